"""What ``fused.between_attention`` computes, by the operators of a model's table that it would take the place of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepinfer_core.api import BetweenPart, BetweenWeights, WeightPart


class BetweenByParts:
    """:class:`~deepinfer_core.api.BetweenAttention` of a table's ``norm``, ``attention_out``, ``down``, ``qkv``, and
    ``gated_linear``, or ``gate_up`` and ``swiglu``."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self._gated = getattr(ops, "gated_linear", None)

    def prepare(self, part: BetweenPart, weights: Sequence[WeightPart], bias: torch.Tensor | None = None) -> Any:
        """A layer's weight, packed by the operator that multiplies by it."""
        op = self._gated if part == "gate_up" and self._gated is not None else getattr(self._ops, part)
        return op.prepare(weights, bias)

    def first(self, residual: torch.Tensor, norm: torch.Tensor, qkv: Any) -> torch.Tensor:
        """``[T, hidden]`` -> ``[T, merged]``."""
        rows: torch.Tensor = self._ops.qkv.run(self._ops.norm.run(residual, norm), qkv)
        return rows

    def run(
        self, attended: torch.Tensor, residual: torch.Tensor, weights: BetweenWeights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T, merged]``, or ``[T, hidden]`` behind the last layer; and the sum, which overwrites ``residual``."""
        ops, gated = self._ops, self._gated
        x = ops.attention_out.run(attended, weights.attention_out)
        x, residual = ops.norm.add(x, residual, weights.norm)
        x = ops.swiglu.run(ops.gate_up.run(x, weights.gate_up)) if gated is None else gated.run(x, weights.gate_up)
        x, residual = ops.norm.add(ops.down.run(x, weights.down), residual, weights.next_norm)
        return (x if weights.next_qkv is None else ops.qkv.run(x, weights.next_qkv)), residual
