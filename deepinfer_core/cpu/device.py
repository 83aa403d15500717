"""The host processor as a device: inline or worker-thread streams, memory from the kernel."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from deepinfer_core.api import DeviceInfo, Event, MemoryInfo, Stream

from .threads import choose_threads

T = TypeVar("T")


class FutureEvent:
    """An event over a future."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> Any:
        return self._future.result()


class InlineStream:
    """Runs each closure before ``submit`` returns."""

    def submit(self, fn: Callable[[], T]) -> Event[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn())
        except BaseException as error:
            future.set_exception(error)
        return FutureEvent(future)

    def close(self) -> None:
        return None


class ThreadStream:
    """Runs closures in order on one worker thread, so that the host can prepare the next step meanwhile."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(1, "deepinfer-stream", initializer=torch.set_num_threads, initargs=(threads,))

    def submit(self, fn: Callable[[], T]) -> Event[T]:
        return FutureEvent(self._pool.submit(fn))

    def close(self) -> None:
        self._pool.shutdown(wait=True)


class CpuDevice:
    """The host, with a thread for each physical core, or as many as ``OMP_NUM_THREADS`` says."""

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self._threads = choose_threads()

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def num_threads(self) -> int:
        return self._threads

    def default_dtype(self, stored: str) -> str:
        """float32: few hosts have 16-bit units, and emulating them is several times slower."""
        return "float64" if stored == "float64" else "float32"

    @property
    def overlaps(self) -> bool:
        """False: a worker thread competes with the host's own work for the same cores."""
        return False

    def stream(self, *, overlap: bool) -> Stream:
        if overlap:
            return ThreadStream(self.num_threads)
        torch.set_num_threads(self.num_threads)
        return InlineStream()

    def memory(self) -> MemoryInfo:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return MemoryInfo(self.info.memory, int(line.split()[1]) * 1024)
        page = os.sysconf("SC_PAGE_SIZE")
        return MemoryInfo(os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page)

    def upload(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array)

    def download(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        return tensor.numpy()

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError) or "can't allocate memory" in str(error)

    def describe(self) -> Mapping[str, str]:
        return {
            "threads": str(self.num_threads),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "torch": torch.__version__,
        }
