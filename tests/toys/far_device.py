"""A backend on a device type of its own, registered from Python; loaded through ``plugins.paths``.

No operator is its own: the reference runs everything, and must name no device to do so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from deepinfer_core.api import DeviceInfo, LazyRef, MemoryInfo, PluginInfo, ProbeEnv, hookimpl

if TYPE_CHECKING:
    import numpy as np
    import torch


class Done:
    """The event of work that was done before ``submit`` returned."""

    def __init__(self, outcome: Future[Any]) -> None:
        self._outcome = outcome

    def done(self) -> bool:
        return True

    def wait(self) -> Any:
        return self._outcome.result()


class InOrder:
    def submit(self, fn: Callable[[], Any]) -> Done:
        outcome: Future[Any] = Future()
        try:
            outcome.set_result(fn())
        except BaseException as error:
            outcome.set_exception(error)
        return Done(outcome)

    def close(self) -> None:
        return None


class FarDevice:
    num_threads = 1
    overlaps = True

    def __init__(self, info: DeviceInfo) -> None:
        from . import far_tensor

        far_tensor.register()
        self.info = info
        self._tensor = far_tensor.FarTensor

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device(self.info.type, 0)

    def default_dtype(self, stored: str) -> str:
        return "float32"

    def stream(self, *, overlap: bool) -> InOrder:
        return InOrder()

    def memory(self) -> MemoryInfo:
        return MemoryInfo(1 << 30, 1 << 30)

    def upload(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        import torch

        return self._tensor(torch.from_numpy(array.copy()))

    def download(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        assert isinstance(tensor, self._tensor), f"a result that never was on the device: {tensor!r}"
        values: np.ndarray[Any, Any] = tensor.raw.numpy().copy()
        return values

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError)

    def describe(self) -> Mapping[str, str]:
        return {}


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name="far_device", help="Reference operators on a device type registered from Python")


@hookimpl
def deepinfer_probe(env: ProbeEnv) -> Sequence[DeviceInfo]:
    return [
        DeviceInfo(
            backend="far",
            type="far",
            arch="python",
            count=1,
            memory=1 << 30,
            priority=-1,
            evidence="registered by the test",
            provider=LazyRef("toys.far_device:FarDevice"),
            fallback="allow",
        )
    ]
