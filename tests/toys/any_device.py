"""A backend for whatever accelerator torch sees, with no operator of its own: everything runs on the reference.

It shows what a hardware vendor gets on the first day, and drives the loop one step ahead on a device that really
works behind the host's back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from deepinfer_core.api import DeviceInfo, LazyRef, MemoryInfo, PluginInfo, ProbeEnv, hookimpl

T = TypeVar("T")


class QueuedEvent:
    """The end of work on the device's current stream."""

    def __init__(self, result: Any, error: BaseException | None) -> None:
        self._result, self._error = result, error
        self._event = torch.Event(torch.accelerator.current_accelerator())
        self._event.record()

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> Any:
        self._event.synchronize()
        if self._error is not None:
            raise self._error
        return self._result


class QueuedStream:
    def submit(self, fn: Callable[[], T]) -> QueuedEvent:
        try:
            return QueuedEvent(fn(), None)
        except BaseException as error:
            return QueuedEvent(None, error)

    def close(self) -> None:
        torch.accelerator.synchronize()


class AnyDevice:
    num_threads = 1
    overlaps = True

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.info.type, 0)

    def default_dtype(self, stored: str) -> str:
        return stored

    def stream(self, *, overlap: bool) -> QueuedStream:
        return QueuedStream()

    def memory(self) -> MemoryInfo:
        free, total = torch.get_device_module(self.info.type).mem_get_info()
        return MemoryInfo(total, free)

    def upload(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.torch_device)

    def download(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        return tensor.cpu().numpy()

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, torch.OutOfMemoryError)

    def describe(self) -> Mapping[str, str]:
        return {"torch": torch.__version__}


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name="any_device", help="Reference operators on whatever torch can use")


@hookimpl
def deepinfer_probe(env: ProbeEnv) -> Sequence[DeviceInfo]:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return []
    return [
        DeviceInfo(
            backend="any",
            type=found.type,
            arch="any",
            count=torch.accelerator.device_count(),
            memory=0,
            priority=100,
            evidence="torch.accelerator",
            provider=LazyRef("toys.any_device:AnyDevice"),
            fallback="allow",
        )
    ]
