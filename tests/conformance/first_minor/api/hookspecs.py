"""Every hook, on one page.

Hooks declare; they do not work. Each returns small records, imports no torch, opens no device, and is
called a handful of times before weights load. Inside a step no hook is ever called.
An implementation takes any subset of a hook's arguments, by name, without defaults.
"""

from __future__ import annotations

from collections.abc import Sequence

import pluggy

from .commands import CommandInfo
from .device import DeviceInfo, ProbeEnv
from .metrics import MetricsSinkInfo
from .model import ModelInfo
from .plan import EnginePlan, Objection, PluginInfo
from .provider import Provider
from .sampling_stages import StageInfo
from .scheduling import PolicyInfo
from .speculation import DrafterInfo

PROJECT = "deepinfer"
API_VERSION = (1, 0)
ENTRY_POINT_GROUP = f"deepinfer.plugins.v{API_VERSION[0]}"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def deepinfer_plugin() -> PluginInfo:  # type: ignore[empty-body]
    """Who you are. Required, once per plugin."""


@hookspec
def deepinfer_probe(env: ProbeEnv) -> Sequence[DeviceInfo]:  # type: ignore[empty-body]
    """Devices of yours on this machine; an empty sequence when there are none."""


@hookspec
def deepinfer_attention(device: DeviceInfo) -> Sequence[Provider]:  # type: ignore[empty-body]
    """Providers of ``attention.*`` operators for the chosen device."""


@hookspec
def deepinfer_gemm(device: DeviceInfo) -> Sequence[Provider]:  # type: ignore[empty-body]
    """Providers of ``gemm.*`` operators for the chosen device."""


@hookspec
def deepinfer_moe_communication(device: DeviceInfo) -> Sequence[Provider]:  # type: ignore[empty-body]
    """Providers of ``moe.*`` operators for the chosen device: routing, and moving rows between experts."""


@hookspec
def deepinfer_pointwise(device: DeviceInfo) -> Sequence[Provider]:  # type: ignore[empty-body]
    """Providers of ``pointwise.*`` operators for the chosen device."""


@hookspec
def deepinfer_sampling(device: DeviceInfo) -> Sequence[Provider]:  # type: ignore[empty-body]
    """Providers of ``sampling.*`` operators for the chosen device."""


@hookspec
def deepinfer_sampling_stages() -> Sequence[StageInfo]:  # type: ignore[empty-body]
    """Stages you add to the built-in ones; their providers come from ``deepinfer_sampling``. Provisional."""


@hookspec
def deepinfer_runner_ops(device: DeviceInfo) -> Sequence[Provider]:  # type: ignore[empty-body]
    """Providers of ``runner.*`` operators for the chosen device."""


@hookspec
def deepinfer_kv_layout(device: DeviceInfo) -> Sequence[Provider]:  # type: ignore[empty-body]
    """Providers of ``kv_layout.*``: how cache groups lie in the chosen device's memory."""


@hookspec
def deepinfer_scheduling() -> Sequence[PolicyInfo]:  # type: ignore[empty-body]
    """Scheduling policies that users may name in ``scheduling.policy``."""


@hookspec
def deepinfer_models() -> Sequence[ModelInfo]:  # type: ignore[empty-body]
    """Architectures you can run."""


@hookspec
def deepinfer_speculation() -> Sequence[DrafterInfo]:  # type: ignore[empty-body]
    """Drafters that users may name in ``speculation.method``. Provisional."""


@hookspec
def deepinfer_metrics() -> Sequence[MetricsSinkInfo]:  # type: ignore[empty-body]
    """Metrics sinks that users may name in ``logging.metrics``."""


@hookspec
def deepinfer_commands() -> Sequence[CommandInfo]:  # type: ignore[empty-body]
    """Commands for the ``deepinfer`` program."""


@hookspec
def deepinfer_check_plan(plan: EnginePlan) -> Sequence[Objection]:  # type: ignore[empty-body]
    """Veto or question a combination, before weights load."""


@hookspec
def deepinfer_worker_start(plan: EnginePlan, rank: int) -> None:
    """Once in every process that runs steps, before weights load: the one legal per-process side effect."""


@hookspec
def deepinfer_worker_stop(rank: int) -> None:
    """Once in every process that ran steps, when its engine closes."""
