"""The NVIDIA backend's operators and recorded steps on the host: Triton's interpreter runs the kernels.

Providers are its own; requests reach them with the device type they expect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
from deepinfer_nvidia_sm100 import plugin
from toys.recording_device import RecordingDevice

from deepinfer_core.api import DeviceInfo, LazyRef, PluginInfo, ProbeEnv, Provider, Supports, hookimpl

BACKEND = "interpreted"


def on_the_host(provider: Provider) -> Provider:
    def supports(request: Any) -> Supports:
        return provider.supports(attrs.evolve(request, device_type="cuda"))

    return attrs.evolve(provider, supports=supports)


def offered(hook: Callable[[DeviceInfo], Sequence[Provider]], device: DeviceInfo) -> list[Provider]:
    if device.backend != BACKEND:
        return []
    return [on_the_host(p) for p in hook(attrs.evolve(device, backend=plugin.BACKEND))]


class InterpretedDevice(RecordingDevice):
    """Records graphs by running them again."""


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name="interpreted_gpu", help="The NVIDIA backend's operators in Triton's interpreter")


@hookimpl
def deepinfer_probe(env: ProbeEnv) -> Sequence[DeviceInfo]:
    return [
        DeviceInfo(
            backend=BACKEND,
            type="cpu",
            arch="interpreter",
            count=1,
            memory=1 << 30,
            priority=-6,
            evidence="the host",
            provider=LazyRef("interpreted_gpu:InterpretedDevice"),
            fallback="warn",
        )
    ]


@hookimpl
def deepinfer_attention(device: DeviceInfo) -> Sequence[Provider]:
    return offered(plugin.deepinfer_attention, device)


@hookimpl
def deepinfer_fused(device: DeviceInfo) -> Sequence[Provider]:
    return offered(plugin.deepinfer_fused, device)


@hookimpl
def deepinfer_gemm(device: DeviceInfo) -> Sequence[Provider]:
    return offered(plugin.deepinfer_gemm, device)


@hookimpl
def deepinfer_pointwise(device: DeviceInfo) -> Sequence[Provider]:
    return offered(plugin.deepinfer_pointwise, device)


@hookimpl
def deepinfer_sampling(device: DeviceInfo) -> Sequence[Provider]:
    return offered(plugin.deepinfer_sampling, device)


@hookimpl
def deepinfer_runner_ops(device: DeviceInfo) -> Sequence[Provider]:
    return offered(plugin.deepinfer_runner_ops, device)


@hookimpl
def deepinfer_kv_layout(device: DeviceInfo) -> Sequence[Provider]:
    return offered(plugin.deepinfer_kv_layout, device)
