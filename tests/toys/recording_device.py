"""The host as a device that records graphs: a replay runs the closure again, on the same tensors.

Operators are the reference's, wrapped to declare that they can be recorded, but for attention, where the reference
plans by host numbers. Every replay is counted, and the result of the one before is overwritten first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepinfer_core.api import (
    BuildContext,
    DeviceInfo,
    LayerCache,
    LazyRef,
    OpRequest,
    PagedAttentionRequest,
    PluginInfo,
    ProbeEnv,
    Provider,
    StepLayout,
    hookimpl,
)
from deepinfer_core.cpu.device import CpuDevice

RECORDED = (
    "attention.paged",
    "attention.write_kv",
    "gemm.linear",
    "pointwise.embedding",
    "pointwise.rms_norm",
    "pointwise.rope",
    "pointwise.swiglu",
    "runner.slot_mapping",
)
REPLAYS: list[int] = []
"""Rows of each replay."""


class Again:
    def __init__(self, fn: Callable[[], torch.Tensor]) -> None:
        self._fn = fn
        self._result = fn()

    def replay(self) -> torch.Tensor:
        self._result.fill_(float("nan"))
        self._result.copy_(self._fn())
        REPLAYS.append(len(self._result))
        return self._result


class RecordingDevice(CpuDevice):
    def capture(self, fn: Callable[[], Any]) -> Again:
        return Again(fn)


class PagedOnDevice:
    """Attention over whole block tables, masked by position: host numbers are not read."""

    def __init__(self, request: PagedAttentionRequest) -> None:
        self._request = request

    def plan(self, layout: StepLayout) -> StepLayout:
        return layout

    def run(self, query: torch.Tensor, cache: LayerCache, plan: StepLayout) -> torch.Tensor:
        request, position = self._request, plan.positions[:, None]
        rows = torch.arange(len(query))
        owner = torch.searchsorted(plan.cu_seqlens.long(), rows, right=True) - 1
        key, value = (
            cache[name][plan.block_table[owner].long()]
            .flatten(1, 2)
            .repeat_interleave(request.q_heads // request.kv_heads, dim=2)
            for name in ("key", "value")
        )
        place = torch.arange(key.shape[1])
        seen = (place <= position) & (place > position - (request.window or key.shape[1]))
        scores = torch.einsum("thd,tchd->htc", query, key) * request.scale
        return torch.einsum("htc,tchd->thd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value)


def build(request: OpRequest, context: BuildContext) -> Any:
    return PagedOnDevice(request) if isinstance(request, PagedAttentionRequest) else context.reference(request)


def offered(family: str) -> list[Provider]:
    caps = {"graph_capture", "kv_layout:paged", "spec_verify"}
    return [Provider(name="again", op=op, build=build, caps=caps) for op in RECORDED if op.startswith(family)]


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name="recording_device", help="Records graphs on the host")


@hookimpl
def deepinfer_probe(env: ProbeEnv) -> Sequence[DeviceInfo]:
    return [
        DeviceInfo(
            backend="recording",
            type="cpu",
            arch="any",
            count=1,
            memory=1 << 30,
            priority=-5,
            evidence="the host",
            provider=LazyRef("toys.recording_device:RecordingDevice"),
            fallback="allow",
        )
    ]


@hookimpl
def deepinfer_attention(device: DeviceInfo) -> Sequence[Provider]:
    return offered("attention.")


@hookimpl
def deepinfer_gemm(device: DeviceInfo) -> Sequence[Provider]:
    return offered("gemm.")


@hookimpl
def deepinfer_pointwise(device: DeviceInfo) -> Sequence[Provider]:
    return offered("pointwise.")


@hookimpl
def deepinfer_runner_ops(device: DeviceInfo) -> Sequence[Provider]:
    return offered("runner.")
