"""A device of the backend ``ascend950`` that is the host with emulated NPU operators, so that the engine can run.

The real package's probe finds no device where there is none; its providers serve whatever device bears its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import torch

from deepinfer_core.api import DeviceInfo, Event, LazyRef, MemoryInfo, PluginInfo, ProbeEnv, Stream, hookimpl

from .emulation import install

T = TypeVar("T")


class _Finished:
    def __init__(self, outcome: Future[Any]) -> None:
        self._outcome = outcome

    def done(self) -> bool:
        return True

    def wait(self) -> Any:
        return self._outcome.result()


class _InOrder:
    def submit(self, fn: Callable[[], T]) -> Event[T]:
        outcome: Future[T] = Future()
        try:
            outcome.set_result(fn())
        except BaseException as error:
            outcome.set_exception(error)
        return _Finished(outcome)

    def close(self) -> None:
        return None


class EmulatedDevice:
    """The host under the backend's name."""

    num_threads = 1
    overlaps = True  # as the real one says: the loop runs one step ahead

    def __init__(self, info: DeviceInfo) -> None:
        install()
        self.info = info

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def default_dtype(self, stored: str) -> str:
        return stored if stored == "float32" else "bfloat16"

    def stream(self, *, overlap: bool) -> Stream:
        return _InOrder()

    def memory(self) -> MemoryInfo:
        return MemoryInfo(total=2 << 30, free=2 << 30)

    def upload(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array.copy())

    def download(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        return tensor.numpy()

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError)

    def describe(self) -> Mapping[str, str]:
        return {"emulated": "yes"}


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name="ascend_emulated", help="The host as an Ascend 950 with emulated operators")


@hookimpl
def deepinfer_probe(env: ProbeEnv) -> Sequence[DeviceInfo]:
    return [
        DeviceInfo(
            backend="ascend950",
            type="cpu",
            arch="Ascend950 (emulated)",
            count=1,
            memory=2 << 30,
            priority=-1,
            evidence="emulated",
            provider=LazyRef("ascend950.emulated_backend:EmulatedDevice"),
            fallback="warn",
            legacy_names=("ascend",),
        )
    ]
