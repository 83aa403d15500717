"""The GPU as the engine sees it, where there is none: the calls it makes of torch, in their order, and its errors."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from deepinfer_nvidia_sm100.device import CudaDevice
from gpu_support import INFO

from deepinfer_core.api import DeviceError


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of torch.cuda."""
    said: list[str] = []

    @contextmanager
    def recording(graph: Any, pool: Any, capture_error_mode: str) -> Any:
        said.append(f"record in {pool}, {capture_error_mode}")
        yield
        said.append("recorded")

    pools = iter(("pool 1", "pool 2", "pool 3"))
    stream = SimpleNamespace(synchronize=lambda: said.append("work is done"))
    event = SimpleNamespace(record=lambda: None, query=lambda: True, synchronize=lambda: said.append("event"))
    fakes = {
        "Event": lambda: event,
        "Stream": lambda *_: stream,
        "current_stream": lambda *_: stream,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_capability": lambda _: (9, 0),
        "set_device": lambda _: None,
        "synchronize": lambda *_: said.append("all is done"),
        "graph_pool_handle": lambda: next(pools),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: said.append("replay")),
        "graph": recording,
        "mem_get_info": lambda *_: (100, 1000),
        "memory_reserved": lambda *_: 70,
        "memory_allocated": lambda *_: 30,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return said


def opened(arch: str = INFO.arch) -> CudaDevice:
    return CudaDevice(attrs.evolve(INFO, arch=arch, evidence="/dev/nvidia0"))


def test_a_graph_is_recorded_after_a_run_and_all_share_one_pool(calls: list[str]) -> None:
    """The run before compiles and allocates, which a recording must not."""
    device = opened()

    def work() -> str:
        calls.append("work")
        return "result"

    graphs = [device.capture(work) for _ in range(2)]
    one = ["all is done", "work", "all is done", "record in pool 1, thread_local", "work", "recorded"]
    assert calls == [*one, *one]
    calls.clear()
    assert graphs[0].replay() == "result"
    assert calls == ["replay"]


def test_a_synchronous_loop_waits_in_submit_and_one_ahead_does_not(calls: list[str]) -> None:
    device = opened()
    event = device.stream(overlap=False).submit(lambda: 3)
    assert calls == ["work is done"]
    assert event.wait() == 3
    calls.clear()
    event = device.stream(overlap=True).submit(lambda: 4)
    assert calls == []
    assert event.wait() == 4
    assert calls == ["event"]


def test_free_memory_counts_what_torch_keeps_unused(calls: list[str]) -> None:
    memory = opened().memory()
    assert (memory.total, memory.free) == (1000, 140)


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_no_memory_is_told_from_other_faults(calls: list[str], error: Any, full: bool) -> None:
    assert opened().is_out_of_memory(error) is full


def test_no_memory_for_what_is_read_back_is_told_as_such(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stands between the allocation and the engine, which asks the device what the error means."""
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    def empty(*_: Any, **more: Any) -> torch.Tensor:
        assert more["pin_memory"]
        raise full

    device, tensor = opened(), torch.arange(3)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        device.download(tensor)
    assert caught.value is full
    assert device.is_out_of_memory(caught.value)


@pytest.mark.parametrize(("cuda", "built"), [(None, "without CUDA"), ("13.0", "for CUDA 13.0")])
def test_a_torch_that_sees_no_gpu_is_the_reason(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, cuda: str | None, built: str
) -> None:
    """The probe looks at the driver alone: what is installed may be a torch for the host, or for a newer driver."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(DeviceError, match=rf"shows /dev/nvidia0, but torch .* built {built}, sees no GPU: install a"):
        opened()


@pytest.mark.parametrize(
    ("visible", "kinds", "fix"),
    [
        (None, [(8, 6), (9, 0)], "sm_86: set CUDA_VISIBLE_DEVICES=1"),
        ("4,2,7", [(8, 6), (8, 6), (9, 0)], "sm_86: set CUDA_VISIBLE_DEVICES=7"),
        (None, [(8, 6)], "sm_86: check: nvidia-smi"),
    ],
)
def test_a_first_gpu_of_another_kind_is_an_error(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, visible: str | None, kinds: list[tuple[int, int]], fix: str
) -> None:
    """Kernels are chosen for the kind that was found, and all work would run on the other."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(kinds))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: kinds[number])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA RTX A6000")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(DeviceError, match=rf"sm_90 was chosen, and the first .* NVIDIA RTX A6000, {fix}"):
        opened()
