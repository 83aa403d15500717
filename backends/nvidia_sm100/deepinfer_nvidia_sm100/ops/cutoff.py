"""Where rows are cut by top-k or top-p, without sorting them.

:mod:`.candidates` has copied tokens that can stay to lists. :mod:`.last_kept` finds the last that stays, one program
a row; the launch below fills rows with -inf and puts back what stays. Where a list does not hold all that stays (more
than fits, or the guess was too high) the row itself is read.

Floor: bytes, 8·N·V: the row is read once and written once, and nothing else grows with it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from deepinfer_core.api import SamplingBatch

from .candidates import RUN, SAMPLE, collect_kernel, guess_kernel
from .dependent import dependent, take_turn
from .keys import cuts, key_of
from .last_kept import FEW, LANES, LISTS, last_kept_kernel

PART = 4096
"""Tokens of one part of a row."""
CAP = 1024
"""Candidates of a part that its list holds."""
ENTRIES = 256
"""Candidates put back at once."""


@triton.jit
def remove_kernel(
    logits, guess, found, values, offsets, state, slots, limit, vocab_size, row_stride,
    MASS: tl.constexpr, PART: tl.constexpr, CAP: tl.constexpr, ENTRIES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (N, parts), in place: what is below the last key goes, and of its equals those of higher ids."""
    take_turn(DEPENDENT)
    row = tl.program_id(0)
    if cuts(tl.load(limit + tl.load(slots + row)), vocab_size, MASS):
        last = tl.load(state + row * 2)
        last_id = tl.load(state + row * 2 + 1).to(tl.int32)
        if last >= 0:
            first = tl.program_id(1) * PART
            place = row * tl.num_programs(1) + tl.program_id(1)
            count = tl.load(found + place)
            column = tl.arange(0, PART)
            inside = first + column < vocab_size
            target = logits + row.to(tl.int64) * row_stride + first
            if (last >= tl.load(guess + row)) & (count <= CAP):
                tl.store(target + column, tl.full((PART,), float("-inf"), tl.float32), mask=inside)
                tl.debug_barrier()  # threads put back what others removed
                for start in range(0, count, ENTRIES):
                    entry = start + tl.arange(0, ENTRIES)
                    real = entry < count
                    value = tl.load(values + place.to(tl.int64) * CAP + entry, mask=real, other=float("-inf"))
                    offset = tl.load(offsets + place.to(tl.int64) * CAP + entry, mask=real, other=0).to(tl.int32)
                    key = key_of(value).to(tl.int64)
                    stays = (key > last) | ((key == last) & (first + offset <= last_id))
                    tl.store(target + offset, value, mask=real & stays)
            else:
                key = key_of(tl.load(target + column, mask=inside, other=float("-inf"))).to(tl.int64)
                goes = (key < last) | ((key == last) & (first + column > last_id))
                tl.store(target + column, float("-inf"), mask=inside & goes)


def cut(logits: torch.Tensor, batch: SamplingBatch, limit: torch.Tensor, *, mass: bool) -> torch.Tensor:
    """Remove, in place, what lies beyond ``limit [S]``: a number of tokens, or with ``mass`` their probability."""
    rows, vocab_size = logits.shape
    if rows == 0:
        return logits
    parts = triton.cdiv(vocab_size, PART)
    device = logits.device
    guess = torch.empty(rows, dtype=torch.int64, device=device)
    peaks = torch.empty((rows, parts), dtype=torch.int64, device=device)
    sums = torch.empty((rows, parts), dtype=torch.float32, device=device)
    found = torch.empty((rows, parts), dtype=torch.int32, device=device)
    values = torch.empty((rows, parts, CAP), dtype=torch.float32, device=device)
    offsets = torch.empty((rows, parts, CAP), dtype=torch.int16, device=device)
    state = torch.empty((rows, 2), dtype=torch.int64, device=device)
    few_keys = torch.empty((rows, FEW), dtype=torch.int64, device=device)
    few_ids = torch.empty((rows, FEW), dtype=torch.int32, device=device)
    of_row = (batch.slots, limit, vocab_size, logits.stride(0))
    fixed: dict[str, Any] = {"MASS": mass, **dependent(logits)}
    lists = {"PART": PART, "CAP": CAP}
    guess_kernel[(rows,)](logits, guess, *of_row, SAMPLE=SAMPLE, RUN=RUN, num_warps=16, **fixed)
    collect_kernel[(rows, parts)](
        logits, guess, peaks, sums, found, values, offsets, *of_row, num_warps=8, **lists, **fixed
    )
    last_kept_kernel[(rows,)](
        logits, guess, peaks, sums, found, values, offsets, few_keys, few_ids, state, *of_row, parts,
        FEW=FEW, LISTS=LISTS, LANES=LANES, PARTS=triton.next_power_of_2(parts), num_warps=8, **lists, **fixed,
    )  # fmt: skip
    remove_kernel[(rows, parts)](
        logits, guess, found, values, offsets, state, *of_row, ENTRIES=ENTRIES, num_warps=4, **lists, **fixed
    )
    return logits
