"""The first reading of a row: what each group of tokens holds at most, and what softmax needs of each part."""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import take_turn
from .noise import bound_of, words
from .ranks import limits_of

PART = 4096
"""Tokens of one part of a row."""
GROUP = 64
"""Tokens of a group, neighbours; twice as many where a row has more than 2,048 such groups."""


@triton.jit
def bounds_of(value, first, heat, position, seed_lo, seed_hi, child, PURPOSE: tl.constexpr, PART: tl.constexpr):
    """What the scores of PART tokens do not exceed, without the row's largest logit taken off."""
    word = words(first, seed_lo, seed_hi, child, position * 3 + PURPOSE, PART)
    return value * (1.0 / heat) + bound_of(word)


@triton.jit(do_not_specialize=["use_t", "use_k", "use_p", "vocab_size"])
def survey_kernel(
    logits, maxima, peaks, sums, slots, positions, temperature, top_k, top_p, seed_lo, seed_hi, child, use_t, use_k,
    use_p, vocab_size, row_stride, width,
    GREEDY: tl.constexpr, PURPOSE: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr, DRAW: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (N, parts), of the first ``vocab_size`` of ``width`` logits a row: ``peaks [N, parts]`` the largest, +inf
    for a NaN; ``sums`` of exponentials from there on; ``maxima [N, parts * PART / GROUP]`` logits, or where every token
    may be drawn, bounds of their scores."""
    take_turn(DEPENDENT)
    row = tl.program_id(0)
    first = tl.program_id(1) * PART
    slot, heat, sampled, k, p = limits_of(
        row, slots, temperature, top_k, top_p, use_t, use_k, use_p, vocab_size, GREEDY, DRAW
    )
    # Asked for here, since nothing waits for them yet.
    position = tl.load(positions + row)
    low = tl.load(seed_lo + slot)
    high = tl.load(seed_hi + slot)
    its_child = tl.load(child + slot)
    if DRAW | (k > 0) | (p < 1.0):
        token = first + tl.arange(0, PART)
        value = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=token < width, other=float("-inf"))
        value = tl.where(value != value, float("inf"), value)
        if first + PART > vocab_size:
            value = tl.where(token < vocab_size, value, float("-inf"))
        place = row * tl.num_programs(1) + tl.program_id(1)
        groups = maxima + place * (PART // GROUP) + tl.arange(0, PART // GROUP)
        bounded = k < 0
        if DRAW:
            bounded = sampled & (k == 0) & (p >= 1.0)
        if bounded:
            top = tl.max(value, axis=0)
            bound = bounds_of(value, first, heat, position, low, high, its_child, PURPOSE, PART)
            tl.store(groups, tl.max(tl.reshape(bound, (PART // GROUP, GROUP)), axis=1))
        else:
            best = tl.max(tl.reshape(value, (PART // GROUP, GROUP)), axis=1)
            top = tl.max(best, axis=0)
            tl.store(groups, best)
            if (top > float("-inf")) & (top < float("inf")) & (k == 0) & (p < 1.0):
                tl.store(sums + place, tl.sum(tl.exp((value - top) * (1.0 / heat)), axis=0))
        tl.store(peaks + place, top)
