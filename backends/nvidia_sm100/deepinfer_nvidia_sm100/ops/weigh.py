"""The second reading of rows whose draw is a race between few tokens: what is before each of them. See :mod:`.race`."""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import take_turn
from .race import EDGES, NEAR, SLOTS
from .ranks import UNIT
from .states import RACED

WIDTH = tl.constexpr(8192)
"""Tokens of a program."""


@triton.jit(do_not_specialize=["vocab_size"])
def weigh_kernel(
    logits, edges, racers, weighed, state, vocab_size, row_stride, width, DEPENDENT: tl.constexpr
):  # fmt: skip
    """Grid (N, programs), pieces in turns: ``weighed [N, pieces, SLOTS]``, sums of exponentials of what is before each
    racer."""
    take_turn(DEPENDENT)
    row = tl.program_id(0)
    if tl.load(state + row) == RACED:
        row_edges = edges + row * EDGES
        pieces = tl.cdiv(vocab_size, WIDTH)
        for turn in range(tl.program_id(1), pieces, tl.num_programs(1)):
            piece = pieces - 1 - turn  # what was read last is still in the cache
            token = piece * WIDTH + tl.arange(0, WIDTH)
            given = logits + row.to(tl.int64) * row_stride + token
            # First to leave the cache: the pieces that are still there, and not read again yet, stay.
            value = tl.load(given, mask=token < width, other=float("-inf"), eviction_policy="evict_first")
            tl.debug_barrier()  # or the compiler lets the row's numbers come first, one after the other
            peak = tl.load(row_edges + 2 * SLOTS)
            scale = tl.load(row_edges + 2 * SLOTS + 1)
            if piece * WIDTH + WIDTH > vocab_size:
                value = tl.where(token < vocab_size, value, float("-inf"))
            weight = tl.exp2((value - peak) * scale)
            for racer in range(tl.load(racers + row * (SLOTS + 2) + SLOTS)):
                same = tl.load(row_edges + racer)
                above = tl.load(row_edges + SLOTS + racer)
                its_token = tl.load(racers + row * (SLOTS + 2) + racer)
                if (its_token >= piece * WIDTH) & (its_token < piece * WIDTH + WIDTH):
                    limits = tl.where(piece * WIDTH + tl.arange(0, WIDTH) < its_token, same, above)
                    mass = tl.sum(tl.where(value >= limits, weight, 0.0), axis=0)
                else:
                    limit = tl.where(its_token < piece * WIDTH, above, same)
                    mass = tl.sum(tl.where(value >= limit, weight, 0.0), axis=0)
                tl.store(weighed + (row * pieces + piece) * SLOTS + racer, mass)


@triton.jit
def end_race(weighed, racers, total, p, row, pieces, PIECES: tl.constexpr):
    """The winner of a row, -1 where the sums do not tell."""
    place = tl.arange(0, SLOTS)
    piece = tl.arange(0, PIECES)
    count = tl.load(racers + row * (SLOTS + 2) + SLOTS)
    barred = tl.load(racers + row * (SLOTS + 2) + SLOTS + 1)
    mass = tl.load(
        weighed + (row * pieces + piece[:, None]) * SLOTS + place[None, :],
        mask=(piece < pieces)[:, None] & (place < count)[None, :],
        other=0.0,
    )
    share = tl.sum(mass.to(tl.float64), axis=0) * UNIT / total
    goes = (share >= p + NEAR) & (share > 0.0)
    stays = (share <= p - NEAR) | (share == 0.0)
    racing = place < count - barred
    first = tl.min(tl.where(racing & (goes == 0), place, SLOTS), axis=0)
    right = tl.max(tl.where((place == first) & stays, 1, 0), axis=0)
    wrong = tl.max(tl.where((place < count) & (racing == 0) & (goes == 0), 1, 0), axis=0)
    return tl.load(racers + row * (SLOTS + 2) + first, mask=(right > 0) & (wrong == 0), other=-1)
