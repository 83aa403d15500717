"""The GPU: its stream, graphs, memory, and the copies between host and device.

One stream carries all work, so that every operator sees what was launched before it. Results come back on a second
stream: with the loop one step ahead, the first already holds the next step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import triton

from deepinfer_core.api import DeviceError, DeviceInfo, Event, Graph, MemoryInfo, Stream

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA_ERROR_OUT_OF_MEMORY")
"""What runtime, cuBLAS and driver write when an allocation of theirs fails, past torch's allocator."""


class QueuedEvent:
    """The end of what a closure launched, with what it returned or raised."""

    def __init__(self, result: Any, error: BaseException | None) -> None:
        self._result, self._error = result, error
        self._event = torch.cuda.Event()
        self._event.record()

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> Any:
        self._event.synchronize()
        if self._error is not None:
            raise self._error
        return self._result


class Launching:
    """Whether a closure is being run: what it downloads is its own, which may not be finished."""

    now = False


class QueuedStream:
    """Launches each closure's work on the current stream and returns before it is done."""

    def __init__(self, launching: Launching) -> None:
        self._launching = launching

    def submit(self, fn: Callable[[], T]) -> Event[T]:
        self._launching.now = True
        try:
            return QueuedEvent(fn(), None)
        except BaseException as error:  # the engine decides what a failed step means
            return QueuedEvent(None, error)
        finally:
            self._launching.now = False

    def close(self) -> None:
        torch.cuda.current_stream().synchronize()


class WaitingStream(QueuedStream):
    """The same, but ``submit`` returns after the work is done: what a synchronous loop asked for."""

    def submit(self, fn: Callable[[], T]) -> Event[T]:
        event = super().submit(fn)
        torch.cuda.current_stream().synchronize()
        return event


class CapturedGraph(Generic[T_co]):
    """A CUDA graph and what its closure returned: tensors of the graphs' own memory."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: T_co) -> None:
        self._graph, self._result = graph, result

    def replay(self) -> T_co:
        self._graph.replay()
        return self._result


def check_kernel_cache(folder: Path) -> None:
    """Compiled kernels are kept in a folder of Triton's, and none runs without it.

    Raises:
        DeviceError: it cannot be made, or not be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written to"
    except OSError as error:
        reason = str(error)
    if reason:
        raise DeviceError(
            f"compiled kernels cannot be kept in {folder}: {reason}; set TRITON_CACHE_DIR to another folder"
        )


def check_first_device(info: DeviceInfo) -> None:
    """All work runs on the first device that torch sees, so that has to be one of the chosen kind.

    Raises:
        DeviceError: torch sees none, or its first one is of another kind.
    """
    if not torch.cuda.is_available():
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        raise DeviceError(
            f"{info.backend}: the driver shows {info.evidence}, but torch {torch.__version__}, which {built}, sees no "
            "GPU: install a torch that is built for a CUDA this driver has, or choose accelerator='cpu'"
        )
    kinds = ["sm_{}{}".format(*torch.cuda.get_device_capability(number)) for number in range(torch.cuda.device_count())]
    if kinds[0] != info.arch:
        fix = "check: nvidia-smi"
        if info.arch in kinds:
            number, visible = kinds.index(info.arch), os.environ.get("CUDA_VISIBLE_DEVICES")
            fix = f"set CUDA_VISIBLE_DEVICES={visible.split(',')[number] if visible else number}"
        raise DeviceError(
            f"{info.backend}: {info.arch} was chosen, and the first GPU that torch sees is "
            f"{torch.cuda.get_device_name(0)}, {kinds[0]}: {fix}"
        )


class CudaDevice:
    """The first device, which is of the chosen kind. Built once, and only when this backend was chosen.

    Raises:
        DeviceError: torch does not see such a device first, or compiled kernels cannot be kept.
    """

    def __init__(self, info: DeviceInfo) -> None:
        check_first_device(info)
        check_kernel_cache(Path(triton.knobs.cache.dir))
        self.info = info
        self._device = torch.device("cuda", 0)
        torch.cuda.set_device(self._device)
        self._results = torch.cuda.Stream(self._device)
        self._launching = Launching()
        self._pool: Any = None

    @property
    def torch_device(self) -> torch.device:
        return self._device

    @property
    def num_threads(self) -> int:
        return torch.get_num_threads()

    def default_dtype(self, stored: str) -> str:
        """The checkpoint's own, except that nothing here is fast in float64."""
        return "float32" if stored == "float64" else stored

    @property
    def overlaps(self) -> bool:
        return True

    def stream(self, *, overlap: bool) -> Stream:
        return (QueuedStream if overlap else WaitingStream)(self._launching)

    def memory(self) -> MemoryInfo:
        """Free memory counts what torch holds but does not use."""
        free, total = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return MemoryInfo(total, free + cached)

    def upload(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        """Through page-locked memory, so that the copy waits for nothing; torch keeps it until the copy is over."""
        host = torch.from_numpy(np.ascontiguousarray(array))
        return host.pin_memory().to(self._device, non_blocking=True) if host.numel() else host.to(self._device)

    def download(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        """The values of what a finished closure returned, on a stream that does not wait for later ones.

        Called by a closure, whose work is still queued, it waits for that.
        """
        if self._launching.now:
            self._results.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._results):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
        self._results.synchronize()
        return host.numpy()

    def capture(self, fn: Callable[[], T]) -> Graph[T]:
        """Run ``fn`` once, so that everything is compiled and allocated, then record it."""
        torch.cuda.synchronize(self._device)
        fn()
        torch.cuda.synchronize(self._device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = fn()
        return CapturedGraph(graph, result)

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, torch.OutOfMemoryError) or (
            isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)
        )

    def describe(self) -> Mapping[str, str]:
        return {
            "device": torch.cuda.get_device_name(self._device),
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
            "triton": triton.__version__,
        }
