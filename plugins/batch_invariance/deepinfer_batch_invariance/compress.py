"""Pooling of tokens into entries on the host: each window in the same shape, whatever else closes in the step.

In numpy, whose exponential is the same for every element wherever it lies, and whose sum over a window adds its rows
in order.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import attrs
import numpy as np
import torch

from deepinfer_core.api import (
    BuildContext,
    CompressRequest,
    LayerCache,
    StepLayout,
)

from .key_lists import Ids
from .layouts import host_positions
from .pointwise import Rope
from .rounding import QuantiseDequantise

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]


@attrs.frozen(eq=False)
class Closing:
    """The N windows of W rows that a step closes.

    Attributes:
        rows: ``[N, W]``, tail rows they read. absent: ``[N, W, 1]``, True before the first token.
        entries: ``[N]``, entry rows written. rotation: tables for their first positions.
    """

    rows: Ids
    absent: np.ndarray[Any, np.dtype[np.bool_]]
    entries: Ids
    rotation: tuple[torch.Tensor, torch.Tensor]


@attrs.frozen(eq=False)
class Plan:
    """``slots [T]``: tail rows written. ``phase [T]``: position within the window."""

    slots: Ids
    phase: Ids
    closing: Closing | None


class Compress:
    """Softmax-weighted pooling per channel, with or without overlap."""

    def __init__(self, request: CompressRequest, context: BuildContext) -> None:
        r = self._request = request
        self._span = r.rate * (2 if r.overlap else 1)
        self._rope = Rope(r.rope, context)
        self._qdq = None if r.rounding is None else QuantiseDequantise(r.rounding, context)

    def plan(self, tail_layout: StepLayout, entry_layout: StepLayout) -> Plan:
        """Find the windows that close in this step."""
        rate, size = self._request.rate, tail_layout.block_size
        position, slots = host_positions(tail_layout), tail_layout.slot_mapping.numpy()
        phase = position % rate
        (rows,) = (phase == rate - 1).nonzero()
        if not len(rows):
            return Plan(slots, phase, None)
        lens = tail_layout.host_query_lens
        owners = np.repeat(np.arange(len(lens)), lens)[rows]
        last = position[rows]
        read = last[:, None] - np.arange(self._span - 1, -1, -1)
        block, offset = np.divmod(np.maximum(read, 0), size)
        closing = Closing(
            rows=tail_layout.block_table.numpy().astype(np.int64)[owners[:, None], block] * size + offset,
            absent=(read < 0)[:, :, None],
            entries=entry_layout.slot_mapping.numpy()[rows] // rate,
            rotation=self._rope.plan(torch.from_numpy(last + 1 - rate)),
        )
        return Plan(slots, phase, closing)

    def run(
        self,
        value: torch.Tensor,
        gate: torch.Tensor,
        tail: LayerCache,
        entries: LayerCache,
        plan: Plan,
        position_bias: torch.Tensor,
        norm: torch.Tensor,
    ) -> None:
        """Write tail rows, then the entries of windows that close."""
        width = value.shape[1]
        # torch's view refuses to copy, where numpy's reshape would write into a copy.
        values, scores = (tail[name].view(-1, width).numpy() for name in ("value", "score"))
        values[plan.slots] = value.numpy()
        scores[plan.slots] = gate.numpy() + position_bias.numpy()[plan.phase]
        closing = plan.closing
        if closing is None:
            return
        pooled = _pooled(self._series(values[closing.rows]), self._series(scores[closing.rows]), closing.absent)
        spread = np.mean(np.square(pooled), axis=1, keepdims=True) + np.float32(self._request.eps)
        normed = torch.from_numpy(pooled / np.sqrt(spread) * norm.numpy())
        entry = self._rope.run(normed[:, None], closing.rotation)[:, 0]
        if self._qdq is not None:
            entry = self._qdq.run(entry)
        entries[self._request.entry].view(-1, entry.shape[1]).numpy()[closing.entries] = entry.numpy()

    def _series(self, rows: Array) -> Array:
        """``[N, W, width]`` -> ``[N, W, head_dim]``: A of the window before, B of the window itself."""
        r = self._request
        if not r.overlap:
            return rows
        return np.concatenate((rows[:, : r.rate, : r.head_dim], rows[:, r.rate :, r.head_dim :]), axis=1)


def _pooled(values: Array, scores: Array, absent: np.ndarray[Any, np.dtype[np.bool_]]) -> Array:
    """``sum_j softmax_j(score_j) * value_j`` over axis 1, rows in order: ``[N, head_dim]``, fresh memory."""
    # Rows before the first token were read from wherever: they may hold anything.
    values, scores = np.where(absent, np.float32(0), values), np.where(absent, np.float32(-np.inf), scores)
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    parts = powers * values
    total, weight = parts[:, 0].copy(), powers[:, 0].copy()
    for row in range(1, powers.shape[1]):
        total += parts[:, row]
        weight += powers[:, row]
    pooled: Array = total / weight
    return pooled
