"""Removes from rows, in place, what is below the least rank that stays."""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import take_turn
from .groups import PART, RUNS
from .keys import key_of
from .ranks import token_of


@triton.jit
def remove_kernel(
    logits, maxima, last, vocab_size, row_stride, groups, GROUP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (N, parts). ``last [N]``: -1 leaves a row alone. Of ``maxima [N, groups]``, groups below are not read."""
    take_turn(DEPENDENT)
    LENGTH: tl.constexpr = GROUP // RUNS
    row = tl.program_id(0)
    piece = tl.num_programs(1) - 1 - tl.program_id(1)  # what was read last is still in the cache
    rank = tl.load(last + row)
    if rank >= 0:
        run = tl.arange(0, PART // LENGTH)
        token = piece * PART + run[:, None] * LENGTH + tl.arange(0, LENGTH)[None, :]
        group = piece * (PART // GROUP) + run % (PART // GROUP)
        best = key_of(tl.load(maxima + row.to(tl.int64) * groups + group))
        least = (rank >> 31).to(tl.uint32)
        target = logits + row.to(tl.int64) * row_stride + token
        inside = token < vocab_size
        if tl.max(best, axis=0) < least:
            gone = tl.full((PART // LENGTH, LENGTH), float("-inf"), tl.float32)
            tl.store(target, gone, mask=inside, cache_modifier=".cs")
        else:
            # Neither what is read last nor what is written stays in the cache, which has better use for its room.
            there = inside & (best >= least)[:, None]
            value = tl.load(target, mask=there, other=float("-inf"), eviction_policy="evict_first")
            key = key_of(value)
            stays = (key > least) | ((key == least) & (token <= token_of(rank)))
            tl.store(target, tl.where(stays, value, float("-inf")), mask=inside, cache_modifier=".cs")
