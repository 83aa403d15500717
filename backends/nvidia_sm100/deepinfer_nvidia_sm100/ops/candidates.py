"""Rows of which much stays: which tokens can stay at all, found in one reading of the row.

A sample of the row, 4,096 tokens in runs of eight, guesses a key that the last token to stay is not below. While the
row is read, tokens at or above that key are copied to a list of their part. A guess that was too high costs time, never
the result: :mod:`.last_kept` then reads the row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import take_turn
from .keys import LEAST_KEY, OTHERS, at, at_or_above, key_of

SAMPLE = 4096
WAYS = tl.constexpr(4)
RUN = 8
"""Neighbours read together: 32 bytes, as much as memory hands out."""


@triton.jit
def guess_kernel(
    logits, guess, state, slots, limit, vocab_size, row_stride,
    MASS: tl.constexpr, SAMPLE: tl.constexpr, RUN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (N,): ``guess [N]`` int64, a key that the last token to stay lies at or above, most likely."""
    take_turn(DEPENDENT)
    row = tl.program_id(0)
    bound = tl.load(limit + tl.load(slots + row))
    if tl.load(state + row * 2) == OTHERS:
        number = tl.arange(0, SAMPLE)
        runs = vocab_size // RUN
        spread = (number // RUN).to(tl.int64) * runs // (SAMPLE // RUN) * RUN + number % RUN
        token = tl.where(runs > SAMPLE // RUN, spread, number)
        inside = token < vocab_size
        value = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=inside, other=float("-inf"))
        share = tl.minimum(vocab_size, SAMPLE).to(tl.float32) / vocab_size
        if MASS:
            # The best tokens of a sample are few and weigh most: all above the median of 16 maxima weigh as much as it.
            maxima = tl.max(tl.reshape(value, (16, SAMPLE // 16)), axis=1)
            better = (maxima[None, :] > maxima[:, None]) | (
                (maxima[None, :] == maxima[:, None]) & (tl.arange(0, 16)[None, :] < tl.arange(0, 16)[:, None])
            )
            place = tl.sum(tl.where(tl.sum(better.to(tl.int32), axis=1) == 8, tl.arange(0, 16), 0), axis=0)
            clip = at(tl.where(maxima == float("-inf"), -3.0e38, maxima), place, 16)
            weight = tl.exp(tl.minimum(value, clip) - clip)
            wanted = (1.0 - 0.8 * (1.0 - bound)) * tl.sum(weight, axis=0)
            distance = tl.full((), 32.0, tl.float32)
            width = tl.full((), 32.0 / WAYS, tl.float32)
            for _ in range(5):
                step = clip - distance + tl.arange(0, WAYS).to(tl.float32) * width
                held = tl.sum(tl.where(value[:, None] >= step[None, :], weight[:, None], 0.0), axis=0)
                reached = tl.max(tl.where(held >= wanted, tl.arange(0, WAYS), -1), axis=0)
                distance = tl.where(reached < 0, 1.0e38, distance - reached * width)
                width = width / WAYS
            low = key_of(clip - distance).to(tl.int64)
        else:
            expected = bound.to(tl.float32) * share
            wanted = (expected + 6.0 * tl.sqrt(expected) + 8.0).to(tl.int32)
            key = key_of(value)
            low = tl.full((), LEAST_KEY, tl.int64)
            width = tl.full((), 0xFF000000 // WAYS, tl.int64)
            for _ in range(9):
                count = tl.sum(at_or_above(key, inside, low, width, WAYS).to(tl.int32), axis=0)
                low += tl.maximum(tl.sum((count >= wanted).to(tl.int32), axis=0) - 1, 0) * width
                width = tl.cdiv(width, WAYS)
        tl.store(guess + row, tl.maximum(low, LEAST_KEY))


@triton.jit
def collect_kernel(
    logits, guess, state, found, values, offsets, slots, limit, vocab_size, row_stride,
    MASS: tl.constexpr, PART: tl.constexpr, CAP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (N, parts): tokens of a part at or above the guess, as far as they fit, and how many there are.

    ``values``, ``offsets [N, parts, CAP]`` in the order of ids, ``found [N, parts]``.
    """
    take_turn(DEPENDENT)
    row = tl.program_id(0)
    if tl.load(state + row * 2) == OTHERS:
        column = tl.arange(0, PART)
        token = tl.program_id(1) * PART + column
        value = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=token < vocab_size, other=float("-inf"))
        key = key_of(value)
        place = row * tl.num_programs(1) + tl.program_id(1)
        mine = key >= tl.load(guess + row).to(tl.uint32)
        rank = tl.cumsum(mine.to(tl.int32), axis=0)
        tl.store(found + place, tl.max(rank, axis=0))
        target = place.to(tl.int64) * CAP + rank - 1
        tl.store(values + target, value, mask=mine & (rank <= CAP))
        tl.store(offsets + target, column.to(tl.int16), mask=mine & (rank <= CAP))
