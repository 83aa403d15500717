"""The device of the backend of interface 1.0: the host, in the members that a device had then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from deepinfer_core.api import DeviceInfo, MemoryInfo


class Done:
    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def done(self) -> bool:
        return True

    def wait(self) -> Any:
        return self._future.result()


class InOrder:
    def submit(self, fn: Callable[[], Any]) -> Done:
        future: Future[Any] = Future()
        try:
            future.set_result(fn())
        except BaseException as error:
            future.set_exception(error)
        return Done(future)

    def close(self) -> None:
        return None


class FirstDevice:
    num_threads = 1
    overlaps = False
    torch_device = torch.device("cpu")

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info

    def default_dtype(self, stored: str) -> str:
        return "float32"

    def stream(self, *, overlap: bool) -> InOrder:
        return InOrder()

    def memory(self) -> MemoryInfo:
        return MemoryInfo(1 << 32, 1 << 31)

    def upload(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array.copy())

    def download(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        result: np.ndarray[Any, Any] = tensor.numpy()
        return result

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError)

    def describe(self) -> Mapping[str, str]:
        return {"first": "minor"}
