"""Where rows are cut by top-k or top-p, without sorting them.

The row is read once for the largest key of every sixteen tokens (:mod:`.maxima`). Where few of these groups can hold
what stays, :mod:`.few_groups` looks at their tokens alone. Else, for rows so flat that much of them stays,
:mod:`.candidates` reads the row once more and copies what can stay to lists, and :mod:`.last_kept` searches those, or
the row itself. The launch below then writes the row, and reads of it the groups that hold something that stays.

Floor: bytes, 8·N·V: the row is read once and written once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from deepinfer_core.api import SamplingBatch

from .candidates import RUN, SAMPLE, collect_kernel, guess_kernel
from .dependent import dependent, take_turn
from .few_groups import few_groups_kernel
from .keys import cuts, key_of
from .last_kept import FEW, LANES, LISTS, last_kept_kernel
from .maxima import GROUP, maxima_kernel

PART = 4096
"""Tokens of one part of a row."""
CAP = 1024
"""Candidates of a part that its list holds."""
GROUPS = 256
"""Groups whose tokens are looked at alone."""


@triton.jit
def remove_kernel(
    logits, maxima, state, slots, limit, vocab_size, row_stride,
    MASS: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (N, parts), in place: what is below the last key goes, and of its equals those of higher ids."""
    take_turn(DEPENDENT)
    row = tl.program_id(0)
    part = tl.num_programs(1) - 1 - tl.program_id(1)  # what was read last is still in the cache
    if cuts(tl.load(limit + tl.load(slots + row)), vocab_size, MASS):
        last = tl.load(state + row * 2)
        last_id = tl.load(state + row * 2 + 1).to(tl.int32)
        if last >= 0:
            column = tl.arange(0, PART)
            token = part * PART + column
            inside = token < vocab_size
            place = (row * tl.num_programs(1) + part) * (PART // GROUP) + column // GROUP
            best = tl.load(maxima + place).to(tl.uint32, bitcast=True)
            least = last.to(tl.uint32)
            target = logits + row.to(tl.int64) * row_stride + token
            value = tl.load(target, mask=inside & (best >= least), other=float("-inf"))
            key = key_of(value)
            stays = (key > least) | ((key == least) & (token <= last_id))
            tl.store(target, tl.where(stays, value, float("-inf")), mask=inside)


def cut(logits: torch.Tensor, batch: SamplingBatch, limit: torch.Tensor, *, mass: bool) -> torch.Tensor:
    """Remove, in place, what lies beyond ``limit [S]``: a number of tokens, or with ``mass`` their probability."""
    rows, vocab_size = logits.shape
    if rows == 0:
        return logits
    parts = triton.cdiv(vocab_size, PART)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty((rows, *shape), dtype=dtype, device=logits.device)

    maxima = empty(parts, PART // GROUP)
    peaks, guess, state = (empty(n, dtype=torch.int64) for n in (parts, 1, 2))
    sums = empty(parts, dtype=torch.float32)
    found, groups, few_ids = empty(parts), empty(GROUPS), empty(FEW)
    few_keys = empty(FEW, dtype=torch.int64)
    values, offsets = empty(parts, CAP, dtype=torch.float32), empty(parts, CAP, dtype=torch.int16)
    of_row = (batch.slots, limit, vocab_size, logits.stride(0))
    fixed: dict[str, Any] = {"MASS": mass, **dependent(logits)}
    width = {"PARTS": triton.next_power_of_2(parts)}
    lists = {"PART": PART, "CAP": CAP}
    grid = (rows, parts)
    maxima_kernel[grid](logits, maxima, peaks, sums, *of_row, PART=PART, GROUP=GROUP, num_warps=4, **fixed)
    few_groups_kernel[(rows,)](
        logits, maxima, peaks, sums, groups, few_keys, few_ids, state, *of_row, parts,
        GROUP=GROUP, GROUPS=GROUPS, FEW=FEW, PER_PART=PART // GROUP, num_warps=16, **width, **fixed,
    )  # fmt: skip
    guess_kernel[(rows,)](logits, guess, state, *of_row, SAMPLE=SAMPLE, RUN=RUN, num_warps=16, **fixed)
    collect_kernel[grid](logits, guess, state, found, values, offsets, *of_row, num_warps=8, **lists, **fixed)
    last_kept_kernel[(rows,)](
        logits, guess, peaks, sums, found, values, offsets, few_keys, few_ids, state, *of_row, parts,
        FEW=FEW, LISTS=LISTS, LANES=LANES, num_warps=8, **lists, **width, **fixed,
    )  # fmt: skip
    remove_kernel[grid](logits, maxima, state, *of_row, PART=PART, GROUP=GROUP, num_warps=4, **fixed)
    return logits
