"""The device: memory, streams, and the only two ways bytes move between host and device."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import torch

from deepinfer_core.api import DeviceInfo, Event, MemoryInfo, Stream

T = TypeVar("T")


class Finished:
    """The event of work that was done before ``submit`` returned. A real one wraps the runtime's event."""

    def __init__(self, outcome: Future[Any]) -> None:
        self._outcome = outcome

    def done(self) -> bool:
        return True

    def wait(self) -> Any:
        return self._outcome.result()


class InOrder:
    """Runs each closure at once. A real one makes its queue current, runs ``fn`` and records an event."""

    def submit(self, fn: Callable[[], T]) -> Event[T]:
        outcome: Future[T] = Future()
        try:
            outcome.set_result(fn())
        except BaseException as error:  # the engine decides what a failed step means
            outcome.set_exception(error)
        return Finished(outcome)

    def close(self) -> None:
        return None


class AcmeDevice:
    """Built once, and only when this backend was chosen."""

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.info.type)

    @property
    def num_threads(self) -> int:
        return torch.get_num_threads()

    def default_dtype(self, stored: str) -> str:
        return "float32"

    @property
    def overlaps(self) -> bool:
        return False  # a real one says True: its queue works while the host prepares the next step

    def stream(self, *, overlap: bool) -> Stream:
        return InOrder()

    def memory(self) -> MemoryInfo:
        return MemoryInfo(self.info.memory, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))

    def upload(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array.copy())  # a real one copies to the device

    def download(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        return tensor.numpy()

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError) or "can't allocate memory" in str(error)

    def describe(self) -> Mapping[str, str]:
        return {"threads": str(self.num_threads), "torch": torch.__version__}
