"""Pooling of tokens into entries on the host, in numpy: a step that closes no window writes its rows and is done."""

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

from .rope_pairs import RopePairs, Turns

Ids: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Array: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]


@attrs.frozen(eq=False)
class Closing:
    """The N windows of W rows that a step closes.

    Attributes:
        rows: ``[N, W]``, tail rows they read. absent: ``[N, W, 1]``, True before the first token; None if nowhere.
        entries: ``[N]``, entry rows written. turns: rotations of their first positions.
    """

    rows: Ids
    absent: np.ndarray[Any, np.dtype[np.bool_]] | None
    entries: Ids
    turns: Turns


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
        self._eps = np.float32(r.eps)
        self._rope = RopePairs(r.rope, context)
        self._qdq = None if r.rounding is None else context.reference(r.rounding)

    def plan(self, tail_layout: StepLayout, entry_layout: StepLayout) -> Plan:
        """Find the windows that close in this step."""
        rate = self._request.rate
        position, slots = tail_layout.positions.numpy(), tail_layout.slot_mapping.numpy()
        phase = position % rate
        (rows,) = (phase == rate - 1).nonzero()
        return Plan(slots, phase, self._closing(rows, position, tail_layout, entry_layout) if len(rows) else None)

    def _closing(self, rows: Ids, position: Ids, tail: StepLayout, entry: StepLayout) -> Closing:
        rate, size = self._request.rate, tail.block_size
        lens = tail.host_query_lens
        owners = np.repeat(np.arange(len(lens)), lens)[rows]
        last = position[rows]
        read = last[:, None] - np.arange(self._span - 1, -1, -1)
        block, offset = np.divmod(np.maximum(read, 0), size)
        absent = read < 0
        return Closing(
            rows=tail.block_table.numpy().astype(np.int64)[owners[:, None], block] * size + offset,
            absent=absent[:, :, None] if absent.any() else None,
            entries=entry.slot_mapping.numpy()[rows] // rate,
            turns=self._rope.plan(torch.from_numpy(last + 1 - rate))[0],
        )

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
        spread = np.mean(np.square(pooled), axis=1, keepdims=True) + self._eps
        normed = pooled / np.sqrt(spread) * norm.numpy()
        entry = self._rope.turned(normed[:, None], closing.turns)[:, 0]
        if self._qdq is not None:
            entry = self._qdq.run(torch.from_numpy(entry)).numpy()
        entries[self._request.entry].view(-1, entry.shape[1]).numpy()[closing.entries] = entry

    def _series(self, rows: Array) -> Array:
        """``[N, W, width]`` -> ``[N, W, head_dim]``: A of the window before, B of the window itself."""
        r = self._request
        if not r.overlap:
            return rows
        return np.concatenate((rows[:, : r.rate, : r.head_dim], rows[:, r.rate :, r.head_dim :]), axis=1)


def _pooled(values: Array, scores: Array, absent: np.ndarray[Any, np.dtype[np.bool_]] | None) -> Array:
    """``sum_j softmax_j(score_j) * value_j`` over axis 1: ``[N, head_dim]``, fresh memory."""
    if absent is not None:
        # Rows before the first token were read from wherever: they may hold anything.
        values, scores = np.where(absent, np.float32(0), values), np.where(absent, np.float32(-np.inf), scores)
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    pooled: Array = (powers * values).sum(axis=1) / powers.sum(axis=1)
    return pooled
