"""The device over a runtime that records what it is asked to do, in place of ``torch.npu``."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from deepinfer_ascend950.capabilities import EVERYTHING
from deepinfer_ascend950.device import AscendDevice


class Runtime:
    """``torch.npu`` as far as the device uses it. An event is done once its stream was synchronised after it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current: str | None = None
        runtime = self

        class Stream:
            count = 0

            def __init__(self) -> None:
                self.name = f"stream{Stream.count}"
                self.pending: list[Any] = []
                Stream.count += 1

            def wait_stream(self, other: str) -> None:
                runtime.log.append(f"{self.name} waits for {other}")

            def synchronize(self) -> None:
                runtime.log.append(f"synchronize {self.name}")
                for event in self.pending:
                    event.finished = True

        class Event:
            def __init__(self) -> None:
                self.finished = False

            def record(self, stream: Any) -> None:
                runtime.log.append(f"record on {stream.name}")
                stream.pending.append(self)

            def query(self) -> bool:
                return self.finished

            def synchronize(self) -> None:
                runtime.log.append("wait")
                self.finished = True

        self.Stream, self.Event = Stream, Event

    @contextmanager
    def stream(self, stream: Any) -> Any:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def current_stream(self) -> str:
        return self.current or "default"

    def mem_get_info(self) -> tuple[int, int]:
        return 7, 11


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


@pytest.fixture
def device(runtime: Runtime) -> AscendDevice:
    return AscendDevice(EVERYTHING, runtime)


def test_work_runs_on_the_stream_and_an_event_marks_its_end(device: AscendDevice, runtime: Runtime) -> None:
    stream = device.stream(overlap=True)
    event = stream.submit(lambda: runtime.current)
    assert "wait" not in runtime.log
    assert not event.done()
    assert event.wait() == "stream1"  # stream0 is for copies
    assert event.done()
    assert runtime.log == ["record on stream1", "wait"]


def test_without_overlap_submit_returns_after_the_work(device: AscendDevice, runtime: Runtime) -> None:
    event = device.stream(overlap=False).submit(lambda: 5)
    assert runtime.log[-1] == "wait"
    assert event.done()
    assert event.wait() == 5


def test_an_error_is_kept_for_who_waits(device: AscendDevice) -> None:
    def fails() -> None:
        raise ValueError("no")

    event = device.stream(overlap=True).submit(fails)
    assert event.done()
    with pytest.raises(ValueError, match="no"):
        event.wait()


def test_closing_a_stream_finishes_it(device: AscendDevice, runtime: Runtime) -> None:
    stream = device.stream(overlap=True)
    event = stream.submit(lambda: 5)
    stream.close()
    assert event.done()


def test_memory_is_free_and_total_in_this_order(device: AscendDevice) -> None:
    memory = device.memory()
    assert (memory.free, memory.total) == (7, 11)


def test_a_download_waits_for_its_own_stream_only(device: AscendDevice, runtime: Runtime) -> None:
    step = device.stream(overlap=True)
    step.submit(lambda: 0)
    runtime.log.clear()
    assert device.download(torch.tensor([1, 2])).tolist() == [1, 2]
    assert runtime.log == ["stream0 waits for default", "synchronize stream0"]


def test_a_closure_that_downloads_waits_for_its_own_work(device: AscendDevice, runtime: Runtime) -> None:
    event = device.stream(overlap=True).submit(lambda: device.download(torch.tensor([3])).tolist())
    assert event.wait() == [3]
    assert runtime.log[:2] == ["stream0 waits for stream1", "synchronize stream0"]


def test_the_first_visible_device_is_used(device: AscendDevice) -> None:
    assert (device.info.type, device.overlaps) == ("npu", True)
    with pytest.raises(RuntimeError, match="npu"):  # torch does not know the type until torch_npu is imported
        device.upload(np.zeros(1))


@pytest.mark.parametrize(("stored", "dtype"), [("bfloat16",) * 2, ("float16",) * 2, ("float32", "bfloat16")])
def test_the_default_dtype_is_a_16_bit_one(device: AscendDevice, stored: str, dtype: str) -> None:
    assert device.default_dtype(stored) == dtype


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("aclrtMalloc failed, error code is 207001"), True),
        (RuntimeError("EL0004: failed to allocate memory"), True),
        (RuntimeError("EZ9999: inner error"), False),
    ],
)
def test_out_of_memory_is_told_from_other_errors(device: AscendDevice, error: Exception, expected: bool) -> None:
    assert device.is_out_of_memory(error) is expected


def test_it_says_that_nobody_ran_it(device: AscendDevice) -> None:
    assert "not run on hardware" in device.describe()["hardware"]
