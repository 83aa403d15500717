"""The operators that are replaced. Each takes its results from the pool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from deepinfer_core.api import (
    AppendTokensRequest,
    BuildContext,
    KVLayoutRequest,
    LayerCache,
    LinearRequest,
    RmsNormRequest,
    WeightPart,
)

from .memory import POOL


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


class PoolLayout:
    """Blocks in the usual places, ``[num_blocks, rows, *entry]`` for each entry of each layer."""

    def __init__(self, request: KVLayoutRequest, context: BuildContext) -> None:
        self._group = request.group
        self._rows = request.block_size // request.group.tokens_per_row

    def block_bytes(self) -> int:
        row = sum(math.prod(entry.shape) * _dtype(entry.dtype).itemsize for entry in self._group.entries)
        return row * self._rows * self._group.layers

    def allocate(self, num_blocks: int) -> list[LayerCache]:
        return [
            {
                entry.name: POOL.empty((num_blocks, self._rows, *entry.shape), _dtype(entry.dtype)).zero_()
                for entry in self._group.entries
            }
            for _ in range(self._group.layers)
        ]


class Linear:
    """``y = x @ W.T (+ bias)`` in float32."""

    def __init__(self, request: LinearRequest, context: BuildContext) -> None:
        self._width = request.out_features

    def prepare(self, weights: Sequence[WeightPart], bias: torch.Tensor | None = None) -> Any:
        parts = [part for part in weights if isinstance(part, torch.Tensor)]
        packed = POOL.copy(torch.cat([part.to(torch.float32) for part in parts]))
        return packed, None if bias is None else POOL.copy(bias.to(torch.float32))

    def run(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        matrix, bias = weight
        result = POOL.empty((len(x), self._width), torch.float32)
        torch.mm(x, matrix.t(), out=result)
        return result if bias is None else result.add_(bias)


class RmsNorm:
    """``w * x / sqrt(mean(x^2) + eps)`` over the last dimension, float32."""

    def __init__(self, request: RmsNormRequest, context: BuildContext) -> None:
        self._eps = request.eps

    def run(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self._eps)
        result = POOL.empty(x.shape, torch.float32)
        return torch.mul(x, scale, out=result).mul_(weight)

    def add(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual.add_(x)
        return self.run(total, weight), total


class AppendTokens:
    """``history[slots, positions] = token_ids``, with 0 for ids of -1."""

    def __init__(self, request: AppendTokensRequest, context: BuildContext) -> None:
        pass

    def run(self, history: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        flat = slots * history.shape[1] + positions
        history.view(-1).scatter_(0, flat, token_ids.clamp(min=0).to(history.dtype))
