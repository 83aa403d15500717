"""The stages between the temperature and the token, in one reading of most rows, in two of flat ones.

:mod:`.survey` reads the row; :mod:`.shortlist` settles it where few groups of tokens can hold what stays; else
:mod:`.band` reads it again, or :mod:`.whole_row` does. Which way a row goes is decided on the device, and a kernel that
has nothing to do for a row leaves at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from deepinfer_core.api import GREEDY_TEMPERATURE, PURPOSE_DRAW, SamplingBatch

from .band import band_kernel, settle_kernel
from .dependent import dependent
from .lists import LANES, REGIONS
from .remove import SIZE, remove_kernel
from .shortlist import shortlist_kernel
from .survey import GROUP, PART, survey_kernel
from .whole_row import whole_row_kernel

BLOCK = 4096
"""Tokens of a whole row that are looked at together."""
WARPS = {"survey": 4, "shortlist": 8, "band": 4, "settle": 16, "whole": 16, "remove": 4}


def draw(logits: torch.Tensor, batch: SamplingBatch, stages: frozenset[str], limit: int) -> torch.Tensor:
    """Tokens, ``[N]`` int64, of ``[N, V]`` float32 logits, which stay as they are.

    Args:
        stages: those of temperature, top_k and top_p that run before the draw.
        limit: ids at or above it are never drawn.
    """
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    limit = min(limit, logits.shape[1])
    if limit <= 0:
        return out.fill_(-1)
    _run(logits, batch, stages, limit, out)
    return out


def cut(logits: torch.Tensor, batch: SamplingBatch, stage: str) -> torch.Tensor:
    """Remove, in place, what ``top_k`` or ``top_p`` does not keep of ``[N, V]`` float32 logits. Broken rows stay."""
    if logits.numel():
        _run(logits, batch, frozenset({stage}), logits.shape[1], None)
    return logits


def _run(
    logits: torch.Tensor, batch: SamplingBatch, stages: frozenset[str], vocab_size: int, out: torch.Tensor | None
) -> None:
    rows, width = logits.shape
    if rows == 0:
        return
    state = batch.state
    parts = triton.cdiv(vocab_size, PART)
    group = GROUP if parts * PART <= 2048 * GROUP else 2 * GROUP
    pieces, per_part = triton.next_power_of_2(parts), PART // group
    groups = parts * per_part

    def empty(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty((rows, size), dtype=dtype, device=logits.device)

    maxima, peaks, sums, band, row_peak = map(empty, (groups, parts, max(parts, REGIONS), 2, 1))
    chosen, found, status = (empty(size, dtype=torch.int32) for size in (pieces * per_part, REGIONS, 1))
    listed, last = (empty(size, dtype=torch.int64) for size in (REGIONS * LANES, 1))
    row_total = empty(1, dtype=torch.float64)
    uses = (int("temperature" in stages), int("top_k" in stages), int("top_p" in stages))
    of_row = (
        batch.slots, batch.positions, state.temperature, state.top_k, state.top_p, state.seed_lo, state.seed_hi,
        state.child, *uses, vocab_size, logits.stride(0),
    )  # fmt: skip
    results = (last, last if out is None else out)
    fixed: dict[str, Any] = {
        "GREEDY": GREEDY_TEMPERATURE, "PURPOSE": PURPOSE_DRAW, "DRAW": out is not None, **dependent(logits)
    }  # fmt: skip
    survey_kernel[(rows, parts)](
        logits, maxima, peaks, sums, *of_row, width, PART=PART, GROUP=group, num_warps=WARPS["survey"], **fixed
    )  # fmt: skip
    shortlist_kernel[(rows,)](
        logits, maxima, peaks, sums, chosen, listed, found, status, band, row_peak, row_total, *results, *of_row,
        parts, GROUP=group, PARTS=pieces, PER_PART=per_part, num_warps=WARPS["shortlist"], **fixed,
    )  # fmt: skip
    if "top_p" in stages:
        band_kernel[(rows, REGIONS)](
            logits, maxima, sums, listed, found, status, band, row_peak, *of_row, width, groups,
            GROUP=group, num_warps=WARPS["band"], **fixed,
        )  # fmt: skip
    if "top_p" in stages or "top_k" in stages:
        settle_kernel[(rows,)](
            logits, maxima, sums, listed, found, status, band, row_peak, row_total, *results, *of_row, groups,
            GROUP=group, GROUPS=pieces * per_part, num_warps=WARPS["settle"], **fixed,
        )  # fmt: skip
        whole_row_kernel[(rows,)](
            logits, status, row_peak, *results, *of_row, BLOCK=BLOCK, num_warps=WARPS["whole"], **fixed
        )  # fmt: skip
    if out is None:
        remove_kernel[(rows, triton.cdiv(vocab_size, SIZE))](
            logits, maxima, last, vocab_size, logits.stride(0), groups, SIZE=SIZE, GROUP=group,
            num_warps=WARPS["remove"], **dependent(logits),
        )  # fmt: skip
