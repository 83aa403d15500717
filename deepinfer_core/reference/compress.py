"""Pooling tokens into entries, exact for every way of cutting the tokens into steps.

All state lies in the caches. A step writes its tail rows first; a window that closes in the step then reads its
rows through the block table, whether they were written now, in an earlier step, or by another request.
"""

from __future__ import annotations

import attrs
import numpy as np
import torch

from deepinfer_core.api import (
    BuildContext,
    CompressRequest,
    LayerCache,
    StepLayout,
)

from .dtypes import dtype_named
from .pointwise import RmsNorm
from .quantise import QuantiseDequantise
from .rope import Rope


@attrs.frozen(eq=False)
class CompressPlan:
    """One step's work.

    Attributes:
        phase: ``[T]`` position within the window.
        tail_blocks, tail_offsets: ``[T]``, rows written.
        window_blocks, window_offsets: ``[N, W]``, rows read by each of the N windows that close.
        absent: ``[N, W]``, True where a row lies before the first token.
        entry_blocks, entry_offsets: ``[N]``, entries written.
        rotation: tables for the windows' first positions.
    """

    phase: torch.Tensor
    tail_blocks: torch.Tensor
    tail_offsets: torch.Tensor
    window_blocks: torch.Tensor
    window_offsets: torch.Tensor
    absent: torch.Tensor
    entry_blocks: torch.Tensor
    entry_offsets: torch.Tensor
    rotation: tuple[torch.Tensor, torch.Tensor]


class Compress:
    """Softmax-weighted pooling per channel, with or without overlap."""

    def __init__(self, request: CompressRequest, context: BuildContext) -> None:
        r = self._request = request
        self._dtype = dtype_named(r.dtype)
        self._norm = RmsNorm(r.entry_norm, context)
        self._rope = Rope(r.rope, context)
        self._qdq = None if r.rounding is None else QuantiseDequantise(r.rounding, context)

    def plan(self, tail_layout: StepLayout, entry_layout: StepLayout) -> CompressPlan:
        """Find the windows that close in this step, on the host."""
        r, device = self._request, tail_layout.positions.device
        lens, contexts = tail_layout.host_query_lens.astype(np.int64), tail_layout.host_seq_lens.astype(np.int64)
        owner = np.repeat(np.arange(len(lens)), lens)
        position = np.arange(len(owner)) + np.repeat(contexts - np.cumsum(lens), lens)
        rows = np.nonzero((position + 1) % r.rate == 0)[0]
        span = r.rate * (2 if r.overlap else 1)
        read = position[rows, None] - np.arange(span - 1, -1, -1)
        windows = torch.from_numpy(np.maximum(read, 0)).to(device)
        owners = torch.from_numpy(owner[rows]).to(device)
        number = torch.div(windows, tail_layout.block_size, rounding_mode="floor")
        tail_slots = tail_layout.slot_mapping
        slots = entry_layout.slot_mapping[torch.from_numpy(rows).to(device)]
        return CompressPlan(
            phase=tail_layout.positions % r.rate,
            tail_blocks=torch.div(tail_slots, tail_layout.block_size, rounding_mode="floor"),
            tail_offsets=tail_slots % tail_layout.block_size,
            window_blocks=tail_layout.block_table.to(torch.int64)[owners[:, None], number],
            window_offsets=windows % tail_layout.block_size,
            absent=torch.from_numpy(read < 0).to(device),
            entry_blocks=torch.div(slots, entry_layout.block_size, rounding_mode="floor"),
            entry_offsets=torch.div(slots % entry_layout.block_size, r.rate, rounding_mode="floor"),
            rotation=self._rope.plan(torch.from_numpy(position[rows] + 1 - r.rate).to(device)),
        )

    def run(
        self,
        value: torch.Tensor,
        gate: torch.Tensor,
        tail: LayerCache,
        entries: LayerCache,
        plan: CompressPlan,
        position_bias: torch.Tensor,
        norm: torch.Tensor,
    ) -> None:
        """Write tail rows, then the entries of windows that close."""
        tail["value"][plan.tail_blocks, plan.tail_offsets] = value
        tail["score"][plan.tail_blocks, plan.tail_offsets] = gate + position_bias[plan.phase]
        if len(plan.entry_blocks) == 0:
            return
        values = self._series(tail["value"][plan.window_blocks, plan.window_offsets])
        scores = self._series(tail["score"][plan.window_blocks, plan.window_offsets])
        absent = plan.absent[:, :, None]
        weights = torch.softmax(scores.masked_fill(absent, float("-inf")), dim=1)
        pooled = (weights * values.masked_fill(absent, 0.0)).sum(1).to(self._dtype)
        entry = self._rope.run(self._norm.run(pooled, norm)[:, None], plan.rotation)[:, 0]
        if self._qdq is not None:
            entry = self._qdq.run(entry)
        cache = entries[self._request.entry]
        cache[plan.entry_blocks, plan.entry_offsets] = entry.to(cache.dtype)

    def _series(self, rows: torch.Tensor) -> torch.Tensor:
        """``[N, W, width]`` -> ``[N, W, head_dim]``: A of the window before, B of the window itself."""
        r = self._request
        if not r.overlap:
            return rows
        return torch.cat((rows[:, : r.rate, : r.head_dim], rows[:, r.rate :, r.head_dim :]), dim=1)
