"""What a closure reads back of its own work, as drafters do, has been computed by then."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from deepinfer_nvidia_sm100 import device
from deepinfer_nvidia_sm100.tables import architecture
from gpu_support import DEVICE, INFO, ON_GPU


class Streams:
    """Streams by name, and who waited for whom, where there is no GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        event = SimpleNamespace(record=lambda: None, query=lambda: True, synchronize=lambda: None)
        results = SimpleNamespace(
            wait_stream=lambda other: self.log.append(f"results wait for {other}"),
            synchronize=lambda: self.log.append("results are there"),
        )
        monkeypatch.setattr(torch.cuda, "Event", lambda: event)
        monkeypatch.setattr(torch.cuda, "Stream", lambda *_: results)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: "work")
        monkeypatch.setattr(torch.cuda, "stream", lambda _: torch.inference_mode())
        monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
        monkeypatch.setattr(device, "check_first_device", lambda _: None)
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))


def opened() -> device.CudaDevice:
    return device.CudaDevice(attrs.evolve(INFO, arch=architecture(DEVICE)))


def test_a_closure_waits_for_its_own_work_and_the_host_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    cuda, values = opened(), torch.arange(3)

    def closure() -> Any:
        return cuda.download(values)

    found = cuda.stream(overlap=True).submit(closure).wait()
    assert found.tolist() == [0, 1, 2]
    assert streams.log == ["results wait for work", "results are there"]
    streams.log.clear()
    cuda.download(values)
    assert streams.log == ["results are there"]


def test_a_closure_that_raised_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    cuda = opened()

    def closure() -> Any:
        raise ValueError("a step failed")

    event = cuda.stream(overlap=True).submit(closure)
    with pytest.raises(ValueError, match="a step failed"):
        event.wait()
    cuda.download(torch.arange(3))
    assert streams.log == ["results are there"]


@pytest.mark.skipif(not ON_GPU, reason="a stream that is behind the host needs a GPU")
def test_values_are_there_on_the_gpu() -> None:
    cuda = opened()
    numbers = np.random.default_rng(random.getrandbits(63)).integers(1, 1000, 64)

    def closure() -> Any:
        held = cuda.upload(np.zeros(64, np.int64))
        torch.cuda._sleep(200_000_000)
        return cuda.download(held.add_(cuda.upload(numbers)))

    for overlap in (True, False):
        assert cuda.stream(overlap=overlap).submit(closure).wait().tolist() == numbers.tolist()
