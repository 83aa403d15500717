"""Many rows compared with their best logits, in one kernel: parts are written some programs after they were read.

Between a row's two readings lie few enough others that the second-level cache still holds it. Programs are started in
order, so that the parts of a row have all been read, or nearly, when the first of them is to be written, and a program
looks a few times until they have. It does not wait for ever, should its device start programs otherwise: what is left
is done by a kernel of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .by_best import changes, put
from .dependent import dependent, take_turn

PART, WARPS = 4096, 8
LAG = 512
"""Programs between reading a part and writing it: more than a row has parts, and 8 MB of logits. With half or twice as
many it takes as long."""
PATIENCE = 3000
"""How often a program looks, some milliseconds in all; the interpreter, which runs them in order, looks twice."""
NOT_YET = tl.constexpr(0x7FFFFFFF)
"""In place of the bits of a part's best logit: a NaN, which none is."""
NOTHING = tl.constexpr(-0x800000)
"""The bits of -inf."""


@triton.jit
def begin_kernel(peaks, size, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """``peaks [size]``: no part has been read."""
    take_turn(DEPENDENT)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(peaks + place, tl.full((BLOCK,), NOT_YET, tl.int32), mask=place < size)


@triton.jit
def said_of(peaks, row, parts, PARTS: tl.constexpr):
    """The bits of the best logits of a row's parts, as other programs have written them by now."""
    part = tl.arange(0, PARTS)
    return tl.load(peaks + row * PARTS + part, mask=part < parts, other=NOTHING, volatile=True)


@triton.jit
def peak_of(said):
    return tl.max(said.to(tl.float32, bitcast=True), axis=0)


@triton.jit
def lagging_kernel(
    logits, peaks, left, slots, parameter, vocab_size, row_stride, parts, total, lag, patience,
    GREEDY: tl.constexpr, MIN_P: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (total + lag,), ``total`` parts of all rows. ``peaks [N, PARTS]`` int32; ``left [N, parts]`` int32, of rows
    that change: parts that were not written."""
    take_turn(DEPENDENT)
    number = tl.program_id(0)
    behind = number - lag
    row = tl.minimum(number, total - 1) // parts
    row_behind = tl.maximum(behind, 0) // parts
    value_behind = tl.load(parameter + tl.load(slots + row_behind))
    reads = (number < total) & changes(tl.load(parameter + tl.load(slots + row)), GREEDY, MIN_P)
    writes = (behind >= 0) & changes(value_behind, GREEDY, MIN_P)
    part = number - row * parts
    token = part * PART + tl.arange(0, PART)
    place = logits + row.to(tl.int64) * row_stride + token
    fresh = tl.load(place, mask=(token < vocab_size) & reads, other=float("-inf"))
    token = (behind - row_behind * parts) * PART + tl.arange(0, PART)
    place = logits + row_behind.to(tl.int64) * row_stride + token
    inside = (token < vocab_size) & writes
    logit = tl.load(place, mask=inside, other=0.0, eviction_policy="evict_first")
    if reads:
        top = tl.max(fresh, axis=0)
        top = tl.where(top == top, top, float("inf"))  # of a part of NaNs alone
        tl.store(peaks + row * PARTS + part, top.to(tl.int32, bitcast=True))
    if writes:
        said = said_of(peaks, row_behind, parts, PARTS)
        missing = tl.max((said == NOT_YET).to(tl.int32), axis=0)
        looks = tl.full((), 0, tl.int32)
        while (missing > 0) & (looks < patience):
            said = said_of(peaks, row_behind, parts, PARTS)
            missing = tl.max((said == NOT_YET).to(tl.int32), axis=0)
            looks += 1
        tl.store(left + behind, missing)
        if missing == 0:
            put(place, inside, logit, peak_of(said), value_behind, MIN_P)


@triton.jit
def left_kernel(
    logits, peaks, left, slots, parameter, vocab_size, row_stride, parts,
    GREEDY: tl.constexpr, MIN_P: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (N,): what was left."""
    take_turn(DEPENDENT)
    row = tl.program_id(0)
    value = tl.load(parameter + tl.load(slots + row))
    if changes(value, GREEDY, MIN_P):
        number = tl.arange(0, PARTS)
        if tl.max(tl.load(left + row * parts + number, mask=number < parts, other=0), axis=0) > 0:
            peak = peak_of(said_of(peaks, row, parts, PARTS))
            for part in range(parts):
                if tl.load(left + row * parts + part) > 0:
                    token = part * PART + tl.arange(0, PART)
                    place = logits + row.to(tl.int64) * row_stride + token
                    inside = token < vocab_size
                    put(place, inside, tl.load(place, mask=inside, other=0.0), peak, value, MIN_P)


def apply(
    logits: torch.Tensor, slots: torch.Tensor, parameter: torch.Tensor, greedy: float, *, min_p: bool
) -> torch.Tensor:
    """The stage, in place, of ``[N, V]`` float32. ``parameter``: by slot, float32."""
    rows, vocab_size = logits.shape
    parts = triton.cdiv(vocab_size, PART)
    pieces = triton.next_power_of_2(parts)
    peaks, left = (torch.empty((rows, size), dtype=torch.int32, device=logits.device) for size in (pieces, parts))
    more = dependent(logits)
    patience = PATIENCE if logits.device.type == "cuda" else 2
    begin_kernel[(triton.cdiv(peaks.numel(), 1024),)](peaks, peaks.numel(), BLOCK=1024, **more)
    given = (logits, peaks, left, slots, parameter, vocab_size, logits.stride(0), parts)
    fixed: dict[str, Any] = {"GREEDY": greedy, "MIN_P": min_p, "PART": PART, "PARTS": pieces, "num_warps": WARPS}
    lagging_kernel[(rows * parts + LAG,)](*given, rows * parts, LAG, patience, **fixed, **more)
    left_kernel[(rows,)](*given, **fixed, **more)
    return logits
