"""A device of the backend ``ascend950`` that is the host with emulated NPU operators, so that the engine can run.

The real package's probe finds no device where there is none; its providers serve whatever device bears its name.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_core.api import DeviceInfo, LazyRef, PluginInfo, ProbeEnv, hookimpl
from deepinfer_core.cpu.device import CpuDevice

from .emulation import install


class EmulatedDevice(CpuDevice):
    """The host under the backend's name."""

    num_threads = 1
    overlaps = True  # as the real one says: the loop runs one step ahead

    def __init__(self, info: DeviceInfo) -> None:
        install()
        super().__init__(info)

    def default_dtype(self, stored: str) -> str:
        return stored if stored == "float32" else "bfloat16"


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
