"""``attention.compress`` with the pooling by an own Triton kernel; norm and rotation by torch_npu where it takes them.

The kernel is compared with the reference in Triton's interpreter and compiled to Ascend 950 IR; it was not run on
hardware, so it is chosen only when ``ops`` names it. Tail rows are written by torch. Rounding, where the request has
one, is the reference's.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch

from deepinfer_ascend950 import support
from deepinfer_ascend950.kernels.compress import pool
from deepinfer_core.api import (
    BuildContext,
    CompressRequest,
    LayerCache,
    StepLayout,
)

from .hyper_mix import lanes
from .rms_norm import RmsNorm
from .rope import Rope


@attrs.frozen(eq=False)
class _Plan:
    """One step's work, on the device.

    Attributes:
        phase: ``[T]``, position within the window. tail: ``[T]``, cache rows written.
        rows: ``[N, span]`` int64, cache rows read by each of the N windows that close.
        gap: ``[N]`` float32, -inf where a window has none before it.
        entries: ``[N]``, cache rows written. rotation: what the rotation planned for the windows' first positions.
    """

    phase: torch.Tensor
    tail: torch.Tensor
    rows: torch.Tensor
    gap: torch.Tensor
    entries: torch.Tensor
    rotation: Any


class Compress:
    """Softmax-weighted pooling per channel, with or without overlap."""

    def __init__(self, request: CompressRequest, context: BuildContext) -> None:
        r = self._request = request
        self._dtype: torch.dtype = getattr(torch, r.dtype)
        norm, rope = r.entry_norm, r.rope
        self._norm: Any = RmsNorm(norm, context) if support.pointwise(norm) else context.reference(norm)
        self._rope: Any = Rope(rope, context) if support.rope(rope) else context.reference(rope)
        self._round: Any = None if r.rounding is None else context.reference(r.rounding)

    def plan(self, tail_layout: StepLayout, entry_layout: StepLayout) -> _Plan:
        """Find the windows that close in this step, on the host."""
        r, device = self._request, tail_layout.positions.device
        lens, contexts = tail_layout.host_query_lens.astype(np.int64), tail_layout.host_seq_lens.astype(np.int64)
        owner = np.repeat(np.arange(len(lens)), lens)
        position = np.arange(len(owner)) + np.repeat(contexts - np.cumsum(lens), lens)
        (closing,) = ((position + 1) % r.rate == 0).nonzero()
        span = r.rate * (2 if r.overlap else 1)
        read = position[closing, None] - np.arange(span - 1, -1, -1)
        seen = torch.from_numpy(np.maximum(read, 0)).to(device)
        owners, steps = (torch.from_numpy(array).to(device) for array in (owner[closing], closing))
        size = tail_layout.block_size
        block = torch.div(seen, size, rounding_mode="floor")
        slots = entry_layout.slot_mapping.index_select(0, steps)
        return _Plan(
            phase=tail_layout.positions % r.rate,
            tail=tail_layout.slot_mapping,
            rows=tail_layout.block_table.to(torch.int64)[owners[:, None], block] * size + seen % size,
            gap=torch.from_numpy(np.where(read[:, 0] < 0, np.float32(-np.inf), np.float32(0))).to(device),
            entries=torch.div(slots, r.rate, rounding_mode="floor"),
            rotation=self._rope.plan(torch.from_numpy(position[closing] + 1 - r.rate).to(device)),
        )

    def run(
        self,
        value: torch.Tensor,
        gate: torch.Tensor,
        tail: LayerCache,
        entries: LayerCache,
        plan: _Plan,
        position_bias: torch.Tensor,
        norm: torch.Tensor,
    ) -> None:
        """Write tail rows, then the entries of windows that close."""
        r = self._request
        values, scores = (tail[name].view(-1, tail[name].shape[-1]) for name in ("value", "score"))
        values.index_copy_(0, plan.tail, value.to(values.dtype))
        scores.index_copy_(0, plan.tail, (gate + position_bias.index_select(0, plan.phase)).to(scores.dtype))
        windows = len(plan.entries)
        if not windows:
            return
        pooled = torch.empty((windows, r.head_dim), dtype=torch.float32, device=value.device)
        block = lanes(r.head_dim)
        pool[(windows, r.head_dim // block)](
            values,
            scores,
            plan.rows,
            plan.gap,
            pooled,
            RATE=r.rate,
            OVERLAP=r.overlap,
            HEAD_DIM=r.head_dim,
            BLOCK=block,
        )
        normed = self._norm.run(pooled.to(self._dtype), norm)
        entry = self._rope.run(normed[:, None].contiguous(), plan.rotation)[:, 0]
        if self._round is not None:
            entry = self._round.run(entry)
        cache = entries[r.entry]
        cache.view(-1, r.head_dim).index_copy_(0, plan.entries, entry.to(cache.dtype))
