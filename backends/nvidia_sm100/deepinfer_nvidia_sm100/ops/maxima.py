"""One reading of a row: the largest key of every group of tokens, and what softmax needs of each part."""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import take_turn
from .keys import cuts, key_of

GROUP = 16
"""Tokens of a group: 64 bytes."""


@triton.jit
def maxima_kernel(
    logits, maxima, peaks, sums, slots, limit, vocab_size, row_stride,
    MASS: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (N, parts): ``maxima [N, parts, PART / GROUP]`` keys as int32, ``peaks [N, parts]`` the largest as int64,
    and ``sums [N, parts]`` of exponentials from the part's largest logit on."""
    take_turn(DEPENDENT)
    row = tl.program_id(0)
    if cuts(tl.load(limit + tl.load(slots + row)), vocab_size, MASS):
        token = tl.program_id(1) * PART + tl.arange(0, PART)
        value = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=token < vocab_size, other=float("-inf"))
        best = tl.max(tl.reshape(key_of(value), (PART // GROUP, GROUP)), axis=1)
        place = row * tl.num_programs(1) + tl.program_id(1)
        tl.store(maxima + place * (PART // GROUP) + tl.arange(0, PART // GROUP), best.to(tl.int32, bitcast=True))
        tl.store(peaks + place, tl.max(best, axis=0).to(tl.int64))
        if MASS:
            top = tl.max(value, axis=0)
            tl.store(sums + place, tl.sum(tl.exp(value - tl.where(top == float("-inf"), 0.0, top)), axis=0))
