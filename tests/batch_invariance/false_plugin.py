"""Three providers that declare batch invariance and do not keep it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepinfer_core.api import (
    BuildContext,
    DeviceInfo,
    LazyRef,
    LinearRequest,
    PluginInfo,
    Provider,
    RmsNormRequest,
    hookimpl,
    yes,
)

CAPS = frozenset({"batch_invariant", "kv_layout:paged", "spec_verify"})


class SplitLinear:
    """Adds up in two parts when there are more than four rows, as a split-K kernel chosen by load does."""

    def __init__(self, request: LinearRequest, context: BuildContext) -> None:
        self._half = request.in_features // 2

    def prepare(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.cat([weight.to(torch.float32) for weight in weights]).double()

    def run(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if len(x) <= 4:
            return (x.double() @ weight.T).float()
        parts = (slice(self._half), slice(self._half, None))
        first, second = ((x[:, part].double() @ weight[:, part].T).float() for part in parts)
        return first + second


class BlockedNorm:
    """Its block follows the number of rows, as in vllm-project/vllm#48271."""

    def __init__(self, request: RmsNormRequest, context: BuildContext) -> None:
        self._eps = request.eps

    def run(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        block = 32 if len(rows) < 16 else 5
        squares = torch.zeros(len(rows), 1)
        for part in rows.split(block, dim=-1):
            total = torch.zeros(len(rows), 1)
            for channel in part.unbind(-1):
                total = total + channel[:, None] * channel[:, None]
            squares = squares + total
        scale = torch.rsqrt(squares / x.shape[-1] + self._eps)
        return (rows * scale * weight).view(x.shape)

    def add(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return self.run(total, weight), total


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name="false_plugin", help="False declarations, for tests")


def _provider(name: str, op: str, target: str) -> Provider:
    return Provider(name=name, op=op, build=LazyRef(target), caps=CAPS, supports=lambda request: yes(1))


@hookimpl
def deepinfer_gemm(device: DeviceInfo) -> Sequence[Provider]:
    return [_provider("split", "gemm.linear", "false_plugin:SplitLinear")]


@hookimpl
def deepinfer_pointwise(device: DeviceInfo) -> Sequence[Provider]:
    return [_provider("blocked", "pointwise.rms_norm", "false_plugin:BlockedNorm")]


@hookimpl
def deepinfer_attention(device: DeviceInfo) -> Sequence[Provider]:
    """The host's own: prompts go through dense attention, decode rows do not."""
    return [_provider("two_ways", "attention.paged", "deepinfer_core.cpu.attention:PagedAttention")]


def operators() -> dict[str, Any]:
    """Provider -> operator it serves."""
    return {"split": "gemm.linear", "blocked": "pointwise.rms_norm", "two_ways": "attention.paged"}
