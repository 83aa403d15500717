"""Logits as unsigned integers of the same order, and a row's limit: what the kernels that cut rows share."""

from __future__ import annotations

import triton
import triton.language as tl

LEAST_KEY = tl.constexpr(0x00800000)
"""Key of the smallest finite float32; -inf is the one below."""


OTHERS = tl.constexpr(-2)
"""``state`` of a row that :mod:`.few_groups` leaves to the kernels that come after."""


@triton.jit
def key_of(value):
    """float32 as uint32 of the same order. -0.0 equals 0.0; NaNs are largest."""
    bits = (value + 0.0).to(tl.uint32, bitcast=True)
    key = tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(value != value, 0xFFFFFFFF, key).to(tl.uint32)


@triton.jit
def value_of(key):
    """The float32 of a key, as uint32; a NaN for the largest."""
    bits = tl.where(key >> 31 == 1, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def cuts(bound, vocab_size, MASS: tl.constexpr):
    """Whether a row with this limit is cut at all."""
    if MASS:
        return bound < 1.0
    else:
        return (bound > 0) & (bound < vocab_size)


@triton.jit
def reaches(count, mass, bound, MASS: tl.constexpr):
    """Whether this many tokens, or as much probability (float64, compared in float32), is all that may stay."""
    if MASS:
        return mass.to(tl.float32) >= bound
    else:
        return count >= bound


@triton.jit
def at_or_above(key, inside, low, width, WAYS: tl.constexpr):
    """Which of the keys ``[n]`` (uint32) lie at or above ``low + j * width``, ``[n, WAYS]``."""
    threshold = low + tl.arange(0, WAYS).to(tl.int64) * width
    step = tl.minimum(threshold, 0xFFFFFFFF).to(tl.uint32)
    possible = threshold <= 0xFFFFFFFF  # beyond the largest key there is nothing
    return (key[:, None] >= step[None, :]) & inside[:, None] & possible[None, :]


@triton.jit
def at(values, place, WAYS: tl.constexpr):
    """Element ``place`` of ``values [WAYS]``; a zero beyond."""
    return tl.sum(tl.where(tl.arange(0, WAYS) == place, values, tl.zeros_like(values)), axis=0)


@triton.jit
def softmax_of(peaks, sums, row, parts, MASS: tl.constexpr, PARTS: tl.constexpr):
    """Largest key of a row (int64), its logit, and with MASS the sum of exponentials from there; from its parts'."""
    part = tl.arange(0, PARTS)
    real = part < parts
    each = tl.load(peaks + row * parts + part, mask=real, other=0)
    peak = tl.max(each, axis=0)
    top = value_of(peak.to(tl.uint32))
    total = tl.full((), 1.0, tl.float32)
    if MASS:
        shrink = tl.exp(tl.where(each < LEAST_KEY, float("-inf"), value_of(each.to(tl.uint32)) - top))
        weights = tl.load(sums + row * parts + part, mask=real, other=0.0) * tl.where(real, shrink, 0.0)
        total = tl.sum(weights.to(tl.float64), axis=0).to(tl.float32)
    return peak, top, total
