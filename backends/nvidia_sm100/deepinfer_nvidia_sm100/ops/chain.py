"""The stages between the temperature and the token, in one reading of most rows, in two of some flat ones.

:mod:`.survey` reads the row. :mod:`.shortlist` settles it where few groups of tokens can hold what stays. Where top-p
alone cuts it, :mod:`.levels` guesses above which logits nearly all lies that stays, :mod:`.race` finds the token that
is drawn, and :mod:`.weigh` reads the row again if need be; to be cut it is read again by :mod:`.band`. :mod:`.settle`
does the rest. Which way a row goes is decided on the device, and a kernel that has nothing to do for a row leaves at
once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from deepinfer_core.api import GREEDY_TEMPERATURE, PURPOSE_DRAW, SamplingBatch

from .band import band_kernel
from .dependent import dependent
from .groups import GROUP, PART
from .levels import levels_kernel
from .lists import LANES, REGIONS
from .race import EDGES, SLOTS, race_kernel
from .remove import remove_kernel
from .settle import settle_kernel
from .shortlist import shortlist_kernel
from .survey import LEVELS, survey_kernel
from .weigh import WIDTH, weigh_kernel

LOOK = 2048
"""Tokens that a race looks at together."""
LEVELLED = 96
"""Rows from which on levels are worth the kernel that guesses them: with fewer, a second reading takes no longer."""
WEIGHERS = 8
"""Programs of a row that may be read again, where levels spare most rows that: leaving at once takes time, too."""
WARPS = {"levels": 4, "survey": 4, "shortlist": 8, "race": 8, "band": 4, "weigh": 8, "settle": 8, "remove": 8}


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
    part = PART.value
    parts = triton.cdiv(vocab_size, part)
    group = GROUP if parts * part <= 2048 * GROUP else 2 * GROUP
    pieces, per_part = triton.next_power_of_2(parts), part // group
    groups, weighings = parts * per_part, triton.cdiv(vocab_size, WIDTH.value)

    def empty(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty((rows, size), dtype=dtype, device=logits.device)

    maxima, bounds, peaks, sums, band, row_peak = map(empty, (groups, groups, parts, max(parts, REGIONS), 2, 1))
    levels, tails = map(empty, (4, LEVELS.value * parts))
    weighed, edges = map(empty, (weighings * SLOTS, EDGES.value))
    chosen, found, racers, status = (
        empty(size, dtype=torch.int32) for size in (pieces * per_part, REGIONS, SLOTS + 2, 1)
    )
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
    levelled = int("top_p" in stages and out is not None and rows >= LEVELLED)
    if levelled:
        levels_kernel[(rows,)](
            logits, levels, *of_row, GREEDY=GREEDY_TEMPERATURE, num_warps=WARPS["levels"], **dependent(logits)
        )
    # As many registers as let seven parts share a multiprocessor.
    survey_kernel[(rows, parts)](
        logits, maxima, bounds, peaks, sums, levels, tails, *of_row, levelled, GROUP=group, num_warps=WARPS["survey"],
        maxnreg=72, **fixed,
    )  # fmt: skip
    shortlist_kernel[(rows,)](
        logits, maxima, bounds, peaks, sums, chosen, listed, found, status, band, row_peak, row_total,
        *results, *of_row, parts, GROUP=group, PARTS=pieces, PER_PART=per_part, num_warps=WARPS["shortlist"], **fixed,
    )  # fmt: skip
    if "top_p" in stages:
        if out is None:
            band_kernel[(rows, REGIONS)](
                logits, sums, listed, found, status, band, row_peak, *of_row, width, GREEDY=GREEDY_TEMPERATURE,
                num_warps=WARPS["band"], **dependent(logits),
            )  # fmt: skip
        else:
            # As many registers as let two rows share a multiprocessor.
            race_kernel[(rows,)](
                logits, maxima, bounds, peaks, sums, levels, tails, chosen, listed, status, edges, racers, row_peak,
                row_total, *results, *of_row, levelled, parts, GREEDY=GREEDY_TEMPERATURE, PURPOSE=PURPOSE_DRAW,
                GROUP=group, PARTS=pieces, PER_PART=per_part, LOOK=LOOK // group, num_warps=WARPS["race"], maxnreg=128,
                **dependent(logits),
            )  # fmt: skip
            weigh_kernel[(rows, min(weighings, WEIGHERS) if levelled else weighings)](
                logits, edges, racers, weighed, status, vocab_size, logits.stride(0), width,
                num_warps=WARPS["weigh"], maxnreg=128, **dependent(logits),
            )  # fmt: skip
    if "top_p" in stages or "top_k" in stages:
        settle_kernel[(rows,)](
            logits, sums, listed, found, status, band, racers, weighed, row_peak, row_total, *results, *of_row,
            weighings, PIECES=triton.next_power_of_2(weighings), num_warps=WARPS["settle"], **fixed,
        )  # fmt: skip
    if out is None:
        remove_kernel[(rows, parts)](
            logits, maxima, last, vocab_size, logits.stride(0), groups, GROUP=group,
            num_warps=WARPS["remove"], **dependent(logits),
        )  # fmt: skip
