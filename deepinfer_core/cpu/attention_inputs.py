"""``fused.attention_inputs`` in float32: queries and keys are normed and turned together, then the cache is written.

For few rows an operation costs its call and not its arithmetic, so half as many operations on twice the heads win.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from deepinfer_core.api import (
    AttentionInputsRequest,
    BuildContext,
    LayerCache,
    StepLayout,
)

from . import attention, transposed_keys
from .pointwise import RmsNorm, Rope


@attrs.frozen(eq=False)
class Plan:
    """The step's layout, and what turns its rows."""

    layout: StepLayout
    turns: Any


class AttentionInputs:
    """Norm of the heads, rotary embedding in halves, cache write."""

    def __init__(self, request: AttentionInputsRequest, context: BuildContext) -> None:
        r = request
        self._heads = (r.q_heads, r.kv_heads)
        self._rows = (-1, r.q_heads + 2 * r.kv_heads, r.head_dim)
        self._rope = Rope(r.rope, context)
        self._norm = None if r.head_norm is None else RmsNorm(r.head_norm, context)
        transposed = f"kv_layout:{transposed_keys.LAYOUT}" in r.demands
        self._write: Any = (transposed_keys if transposed else attention).WriteKV(r.write_kv, context)
        self._weights: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def plan(self, layout: StepLayout) -> Plan:
        """cos and signed sin of every row."""
        return Plan(layout, self._rope.plan(layout.positions))

    def run(
        self,
        qkv: torch.Tensor,
        cache: LayerCache,
        plan: Plan,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``qkv [T, (q_heads + 2 * kv_heads) * head_dim]`` -> queries ``[T, q_heads, head_dim]``."""
        queries, keys = self._heads
        rows = qkv.view(self._rows)
        heads = rows[:, : queries + keys]
        if self._norm is not None:
            assert q_norm is not None
            assert k_norm is not None
            heads = self._norm.run(heads, self._stacked(q_norm, k_norm))
        heads = self._rope.run(heads, plan.turns)
        self._write.run(heads[:, queries:], rows[:, queries + keys :], cache, plan.layout)
        return heads[:, :queries]

    def _stacked(self, q_norm: torch.Tensor, k_norm: torch.Tensor) -> torch.Tensor:
        """The norms' weights by head, ``[q_heads + kv_heads, head_dim]``, made once for a layer."""
        known = self._weights.get(id(q_norm))
        if known is None or known[0] is not q_norm or known[1] is not k_norm:
            queries, keys = self._heads
            stacked = torch.cat((q_norm.expand(queries, -1), k_norm.expand(keys, -1)))
            known = self._weights[id(q_norm)] = (q_norm, k_norm, stacked)
        return known[2]
