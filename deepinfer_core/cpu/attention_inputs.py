"""``fused.attention_inputs`` in float32: queries and keys are normed and turned together, then the cache is written.

For few rows an operation costs its call and not its arithmetic, so half as many operations on twice the heads win, and
what all layers share is made once a step.
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
from .pointwise import Rope


@attrs.frozen(eq=False)
class Room:
    """For a layer's normed heads, used anew in each layer.

    Attributes:
        normed: ``[T, q_heads + kv_heads, head_dim]``. Behind every head its first half is repeated, so that
            ``swapped``, which begins at the second half, is the same head with the channels of each pair exchanged.
        first, repeated: that half, and where its copy goes.
    """

    normed: torch.Tensor
    first: torch.Tensor
    repeated: torch.Tensor
    swapped: torch.Tensor

    @classmethod
    def of(cls, rows: int, heads: int, size: int) -> Room:
        half = size // 2
        with torch.inference_mode(False):  # it outlives the step that asks for it
            memory = torch.empty(rows, heads, size + half)
        return cls(memory[..., :size], memory[..., :half], memory[..., size:], memory[..., half:])


@attrs.frozen(eq=False)
class Plan:
    """The step's layout, and ``[T, 1, head_dim]`` each: cos, and sin with the sign of a pair's first channel."""

    layout: StepLayout
    cos: torch.Tensor
    sin: torch.Tensor
    room: Room


class AttentionInputs:
    """Norm of the heads, rotary embedding in halves, cache write."""

    def __init__(self, request: AttentionInputsRequest, context: BuildContext) -> None:
        r = request
        self._heads = (r.q_heads, r.kv_heads)
        self._rows = (-1, r.q_heads + 2 * r.kv_heads, r.head_dim)
        self._rope = Rope(r.rope, context)
        self._root = r.head_dim**0.5
        eps = r.norm_eps
        self._least = None if eps is None else torch.tensor((r.head_dim * eps) ** 0.5, dtype=torch.float32)
        transposed = f"kv_layout:{transposed_keys.LAYOUT}" in r.demands
        self._write: Any = (transposed_keys if transposed else attention).WriteKV(r.write_kv, context)
        self._put: Any = getattr(self._write, "put", None)
        self._room: Room | None = None
        self._weights: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def plan(self, layout: StepLayout) -> Plan:
        """cos and signed sin of every row, and room."""
        cos, sin = self._rope.plan(layout.positions)
        rows = layout.positions.shape[0]
        if self._room is None or rows != self._room.normed.shape[0]:
            self._room = Room.of(rows, sum(self._heads), self._rows[2])
        return Plan(layout, cos, sin, self._room)

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
        rows, room = qkv.view(self._rows), plan.room
        heads = rows.narrow(1, 0, queries + keys)
        if self._least is None:
            room.normed.copy_(heads)
        else:
            assert q_norm is not None
            assert k_norm is not None
            length = torch.linalg.vector_norm(heads, 2, -1, True).hypot_(self._least)
            torch.div(heads, length, out=room.normed).mul_(self._stacked(q_norm, k_norm))
        room.repeated.copy_(room.first)
        turned = torch.mul(room.normed, plan.cos).addcmul_(room.swapped, plan.sin)
        if self._put is None:
            written = turned.narrow(1, queries, keys), rows.narrow(1, queries + keys, keys)
            self._write.run(*written, cache, plan.layout)
        else:  # an array's part costs a tenth of a tensor's
            self._put(turned.numpy()[:, queries:], rows.numpy()[:, queries + keys :], cache, plan.layout)
        return turned.narrow(1, 0, queries)

    def _stacked(self, q_norm: torch.Tensor, k_norm: torch.Tensor) -> torch.Tensor:
        """The norms' weights by head, times sqrt(head_dim): ``[heads, head_dim]``, made once for a layer."""
        known = self._weights.get(id(q_norm))
        if known is None or known[0] is not q_norm or known[1] is not k_norm:
            queries, keys = self._heads
            stacked = torch.cat((q_norm.expand(queries, -1), k_norm.expand(keys, -1))).mul_(self._root)
            known = self._weights[id(q_norm)] = (q_norm, k_norm, stacked)
        return known[2]
