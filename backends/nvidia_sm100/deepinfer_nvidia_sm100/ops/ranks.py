"""Tokens in the order in which they stay: by logit, then by lower id, as one integer each.

A rank is a key (:func:`.keys.key_of`) times 2^31, plus what grows with a lower id: no two tokens of a row share one.
Cutting a row is finding the least rank that stays. Masses are integers, 2^32 to the likeliest token, so that no sum
depends on its order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .keys import key_of, value_of
from .noise import philox

BOUND_SHIFT = tl.constexpr(159.0 * 0.6931471805599453)
"""Left out of bounds that the survey writes."""
ID_MASK = tl.constexpr(0x7FFFFFFF)
UNIT = tl.constexpr(2.0**32)
COUNTED, MASS = tl.constexpr(1 << 48), tl.constexpr((1 << 48) - 1)


@triton.jit
def limits_of(
    row, slots, temperature, top_k, top_p, use_t, use_k, use_p, vocab_size, GREEDY: tl.constexpr, DRAW: tl.constexpr
):
    """A row's parameters: slot, divisor (1: none), whether it is drawn at random, top_k (0: off), top_p (1: off)."""
    slot = tl.load(slots + row)
    heat = tl.load(temperature + slot)
    sampled = heat == heat
    if DRAW:
        sampled = heat >= GREEDY
    heat = tl.where(sampled & (use_t != 0), heat, 1.0)
    k = tl.load(top_k + slot)
    k = tl.where((use_k != 0) & sampled & (k > 0) & (k < vocab_size), k, 0).to(tl.int32)
    p = tl.where((use_p != 0) & sampled, tl.load(top_p + slot), 1.0)
    return slot, heat, sampled, k, p


@triton.jit
def raced(k, p):
    """Whether a draw from this row is a race, see :mod:`.race`. Below the limit hardly any token scored would stay."""
    return (k == 0) & (p < 1.0) & (p >= 0.1)


@triton.jit
def total_of(row_sums, part, each, peak, heat):
    """The sum of a row's exponentials from its peak on, times UNIT, float64. ``each``: the parts' largest logits."""
    there = each > float("-inf")
    sum_of = tl.load(row_sums + part, mask=there, other=0.0)
    shrink = tl.exp((each - peak) * (1.0 / heat))
    return tl.sum((sum_of * tl.where(there, shrink, 0.0)).to(tl.float64), axis=0) * UNIT


@triton.jit
def tempered(value, peak, heat):
    """As the stage ``temperature`` leaves a logit of a row with this largest one."""
    return tl.where(heat == 1.0, value, tl.div_rn(value - peak, heat))


@triton.jit
def rank_of(value, token):
    return (key_of(value).to(tl.int64) << 31) | (token.to(tl.int64) ^ ID_MASK)


@triton.jit
def token_of(rank):
    return ((rank & ID_MASK) ^ ID_MASK).to(tl.int32)


@triton.jit
def logit_of(rank):
    return value_of((rank >> 31).to(tl.uint32))


@triton.jit
def slack_of(peak, heat):
    """What a bound's score may fall short by, rounded: scores of logits near the peak are within 32 of it."""
    return 1e-4 + (tl.abs(peak / heat) + 128.0) * (2.0**-20)


@triton.jit
def mass_of(value, top):
    return (tl.exp(value - top).to(tl.float64) * UNIT + 0.5).to(tl.int64)


@triton.jit
def least_by_count(rank, low, high, k, enough):
    """A rank that at least k have and at most ``enough``, or k; at least k have ``low``, fewer ``high``."""
    held = tl.sum((rank >= low).to(tl.int32), axis=0)
    while (held > tl.maximum(k, enough)) & (high - low > 1):
        middle = low + (high - low) // 2
        count = tl.sum((rank >= middle).to(tl.int32), axis=0)
        if count >= k:
            low = middle
            held = count
        else:
            high = middle
    return low


@triton.jit
def reached(mass, total, p):
    """Whether this much of a total is all that may stay."""
    return (mass.to(tl.float64) / total).to(tl.float32) >= p


@triton.jit
def least_by_mass(rank, mass, low, high, above, total, p, enough):
    """A rank with which the limit is reached, and whether it is with ``low``; without it, ``low``.

    The least such rank, or one that at most ``enough`` have. Up to 16,383 ranks. ``above``: mass of better tokens that
    are not among these.
    """
    each = mass | COUNTED  # number and mass in one sum
    held = tl.sum(tl.where(rank >= low, each, 0), axis=0)
    there = reached(above + (held & MASS), total, p)
    more = held * 0
    while there & ((held >> 48) - (more >> 48) > 1) & ((held >> 48) > enough) & (high - low > 1):
        middle = low + (high - low) // 2
        here = tl.sum(tl.where(rank >= middle, each, 0), axis=0)
        if reached(above + (here & MASS), total, p):
            low = middle
            held = here
        else:
            high = middle
            more = here
    return low, there


@triton.jit
def word_of(token, slot, position, seed_lo, seed_hi, child, PURPOSE: tl.constexpr):
    """The words of single tokens."""
    zero = (token * 0).to(tl.uint32)
    stream = position * 3 + PURPOSE
    w0, w1, w2, w3 = philox(
        (token // 4).to(tl.uint32),
        tl.load(child + slot).to(tl.uint32) + zero,
        (stream & 0xFFFFFFFF).to(tl.uint32) + zero,
        (stream >> 32).to(tl.uint32) + zero,
        tl.load(seed_lo + slot).to(tl.uint32) + zero,
        tl.load(seed_hi + slot).to(tl.uint32) + zero,
    )
    place = token % 4
    return tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3))
