"""Where rows are cut by top-k or top-p, without sorting them.

Logits become unsigned integers of the same order. The key of the last token that stays is found four bits at a time,
from the highest: every part of a row counts, or weighs, the tokens at or above sixteen keys at once, and the next
launch adds the parts up and goes on from the digit found. A last launch removes what is below, and, of the tokens that
equal the last one, those with the highest ids. All parts of all rows work at once, so that a single row is not left to
one multiprocessor.

Floor: bytes, 8·N·V. Here the row is read ten or eleven times, from the cache as long as the rows fit there.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from deepinfer_core.api import SamplingBatch

from .dependent import dependent, take_turn

PART = 4096
"""Tokens of one part of a row."""
BLOCK = 512
"""Tokens compared with all keys at once."""
DIGITS = 8


@triton.jit
def key_of(value):
    """float32 as uint32 of the same order. -0.0 equals 0.0; NaNs are largest."""
    bits = (value + 0.0).to(tl.uint32, bitcast=True)
    key = tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(value != value, 0xFFFFFFFF, key).to(tl.uint32)


@triton.jit
def cuts(bound, vocab_size, MASS: tl.constexpr):
    """Whether a row with this limit is cut at all."""
    if MASS:
        return bound < 1.0
    else:
        return (bound > 0) & (bound < vocab_size)


@triton.jit
def total_of(sums, row, parts, PARTS: tl.constexpr):
    """Largest logit, and the sum of ``exp(logit - largest)``, of a row ``[parts, 2]``."""
    part = tl.arange(0, PARTS)
    peaks = tl.load(sums + (row * parts + part) * 2, mask=part < parts, other=float("-inf"))
    weights = tl.load(sums + (row * parts + part) * 2 + 1, mask=part < parts, other=0.0)
    top = tl.max(peaks, axis=0)
    return top, tl.sum(weights * tl.exp(tl.where(peaks == float("-inf"), float("-inf"), peaks - top)), axis=0)


@triton.jit
def advance(state, reached, bound, row, rows, parts, turn, MASS: tl.constexpr, PARTS: tl.constexpr):
    """The key found so far: the one before digit ``turn - 1``, and that digit, from the parts' sums."""
    before = tl.load(state + row * 9 + turn - 1)
    part = tl.arange(0, PARTS)
    digit = tl.arange(0, 16)
    base = reached + ((turn - 1).to(tl.int64) * rows + row) * parts * 16
    each = tl.load(base + part[:, None] * 16 + digit[None, :], mask=(part < parts)[:, None], other=0)
    if MASS:
        enough = tl.sum(each.to(tl.float64), axis=0).to(tl.float32) >= bound
    else:
        enough = tl.sum(each, axis=0) >= bound
    # Digit 0 always holds; sums fall as keys rise, so the last that holds is the number that hold, less one.
    held = tl.maximum(tl.sum(enough.to(tl.int32), axis=0) - 1, 0)
    return before + (held.to(tl.int64) << (32 - 4 * turn).to(tl.int64))


@triton.jit
def sums_kernel(
    logits, sums, slots, limit, vocab_size, row_stride, MASS: tl.constexpr, PART: tl.constexpr, DEPENDENT: tl.constexpr
):
    """Grid (N, parts): largest logit of a part and its sum of exponentials from there."""
    take_turn(DEPENDENT)
    row = tl.program_id(0)
    if cuts(tl.load(limit + tl.load(slots + row)), vocab_size, MASS):
        token = tl.program_id(1) * PART + tl.arange(0, PART)
        value = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=token < vocab_size, other=float("-inf"))
        top = tl.max(value, axis=0)
        place = sums + (row * tl.num_programs(1) + tl.program_id(1)) * 2
        tl.store(place, top)
        if MASS:
            tl.store(place + 1, tl.sum(tl.exp(value - tl.where(top == float("-inf"), 0.0, top)), axis=0))


@triton.jit(do_not_specialize=["turn", "rows"])
def digit_kernel(
    logits,
    sums,
    state,
    reached,
    slots,
    limit,
    vocab_size,
    row_stride,
    rows,
    turn,
    MASS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (N, parts): how much of a part lies at or above each of sixteen keys. ``reached [8, N, parts, 16]``."""
    take_turn(DEPENDENT)
    row = tl.program_id(0)
    parts = tl.num_programs(1)
    bound = tl.load(limit + tl.load(slots + row))
    if cuts(bound, vocab_size, MASS):
        last = tl.full((), 0, tl.int64)
        if turn > 0:
            last = advance(state, reached, bound, row, rows, parts, turn, MASS, PARTS)
        if tl.program_id(1) == 0:
            tl.store(state + row * 9 + turn, last)
        digit = tl.arange(0, 16)
        keys = (last + (digit.to(tl.int64) << (28 - 4 * turn).to(tl.int64))).to(tl.uint32)
        if MASS:
            top, total = total_of(sums, row, parts, PARTS)
            found = tl.zeros((BLOCK, 16), tl.float32)
        else:
            found = tl.zeros((BLOCK, 16), tl.int32)
        for start in range(tl.program_id(1) * PART, tl.program_id(1) * PART + PART, BLOCK):
            token = start + tl.arange(0, BLOCK)
            inside = token < vocab_size
            value = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=inside, other=float("-inf"))
            above = (key_of(value)[:, None] >= keys[None, :]) & inside[:, None]
            if MASS:
                share = tl.div_rn(tl.exp(value - top), total)
                found += tl.where(above, share[:, None], 0.0)
            else:
                found += above.to(tl.int32)
        place = reached + ((turn.to(tl.int64) * rows + row) * parts + tl.program_id(1)) * 16
        tl.store(place + digit, tl.sum(found, axis=0))


@triton.jit
def count_kernel(
    logits,
    sums,
    state,
    reached,
    counts,
    slots,
    limit,
    vocab_size,
    row_stride,
    rows,
    last_turn,
    MASS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (N, parts): tokens above the last key, tokens equal to it, and the mass above. ``counts [N, parts, 3]``."""
    take_turn(DEPENDENT)
    row = tl.program_id(0)
    parts = tl.num_programs(1)
    bound = tl.load(limit + tl.load(slots + row))
    if cuts(bound, vocab_size, MASS):
        top, total = total_of(sums, row, parts, PARTS)
        last = advance(state, reached, bound, row, rows, parts, last_turn, MASS, PARTS)
        last = tl.minimum(last, key_of(top).to(tl.int64))
        if tl.program_id(1) == 0:
            tl.store(state + row * 9 + 8, last)
        token = tl.program_id(1) * PART + tl.arange(0, PART)
        inside = token < vocab_size
        value = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=inside, other=float("-inf"))
        key = key_of(value)
        above = (key > last.to(tl.uint32)) & inside
        place = counts + (row * parts + tl.program_id(1)) * 3
        tl.store(place, tl.sum(above.to(tl.int32), axis=0).to(tl.float64))
        tl.store(place + 1, tl.sum(((key == last.to(tl.uint32)) & inside).to(tl.int32), axis=0).to(tl.float64))
        if MASS:
            share = tl.div_rn(tl.exp(value - top), total).to(tl.float64)
            tl.store(place + 2, tl.sum(tl.where(above, share, 0.0), axis=0))


@triton.jit
def remove_kernel(
    logits,
    sums,
    state,
    counts,
    slots,
    limit,
    vocab_size,
    row_stride,
    MASS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (N, parts), in place: equals of the last key stay from the lowest id on, as far as the limit reaches."""
    take_turn(DEPENDENT)
    row = tl.program_id(0)
    parts = tl.num_programs(1)
    bound = tl.load(limit + tl.load(slots + row))
    if cuts(bound, vocab_size, MASS):
        last = tl.load(state + row * 9 + 8).to(tl.uint32)
        part = tl.arange(0, PARTS)
        place = counts + (row * parts + part) * 3
        more = tl.sum(tl.load(place, mask=part < parts, other=0.0), axis=0)
        earlier = tl.sum(tl.load(place + 1, mask=part < tl.program_id(1), other=0.0), axis=0)
        token = tl.program_id(1) * PART + tl.arange(0, PART)
        inside = token < vocab_size
        target = logits + row.to(tl.int64) * row_stride + token
        value = tl.load(target, mask=inside, other=float("-inf"))
        key = key_of(value)
        equal = (key == last) & inside
        rank = earlier + (tl.cumsum(equal.to(tl.int32), axis=0) - 1).to(tl.float64)
        if MASS:
            top, total = total_of(sums, row, parts, PARTS)
            before = tl.sum(tl.load(place + 2, mask=part < parts, other=0.0), axis=0)
            share = tl.div_rn(tl.exp(value - top), total).to(tl.float64)
            stays = ((before + rank * share).to(tl.float32) < bound) | (more + rank == 0.0)
        else:
            stays = more + rank < bound.to(tl.float64)
        tl.store(target, float("-inf"), mask=inside & ((key < last) | (equal & (stays == 0))))


def cut(logits: torch.Tensor, batch: SamplingBatch, limit: torch.Tensor, *, mass: bool) -> torch.Tensor:
    """Remove, in place, what lies beyond ``limit [S]``: a number of tokens, or with ``mass`` their probability."""
    rows, vocab_size = logits.shape
    if rows == 0:
        return logits
    parts = triton.cdiv(vocab_size, PART)
    sums = logits.new_empty((rows, parts, 2))
    state = logits.new_empty((rows, DIGITS + 1), dtype=torch.int64)
    reached = logits.new_empty((DIGITS, rows, parts, 16), dtype=torch.float32 if mass else torch.int32)
    counts = logits.new_empty((rows, parts, 3), dtype=torch.float64)
    of_row = (batch.slots, limit, vocab_size, logits.stride(0))
    fixed: dict[str, Any] = {"MASS": mass, "PART": PART, **dependent(logits)}
    width = {"PARTS": triton.next_power_of_2(parts)}
    grid = (rows, parts)
    sums_kernel[grid](logits, sums, *of_row, **fixed)
    for turn in range(DIGITS):
        digit_kernel[grid](logits, sums, state, reached, *of_row, rows, turn, BLOCK=BLOCK, **width, **fixed)
    count_kernel[grid](logits, sums, state, reached, counts, *of_row, rows, DIGITS, **width, **fixed)
    remove_kernel[grid](logits, sums, state, counts, *of_row, **width, **fixed)
    return logits
