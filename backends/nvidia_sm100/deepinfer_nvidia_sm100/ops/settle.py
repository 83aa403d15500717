"""What is left of a row: its list, a band's list, a race, or all of it."""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import take_turn
from .lists import LANES, REGIONS, draw_listed, entries, least_of
from .long_list import settle_long
from .ranks import UNIT, limits_of, logit_of, rank_of, reached, tempered
from .states import BAND, DONE, LISTED, OPEN, RACED
from .weigh import end_race

NARROW, WIDE, LONG = tl.constexpr(128), tl.constexpr(512), tl.constexpr(64)
"""Entries of a region that are held in registers, and read together when there are more."""
BLOCK = tl.constexpr(4096)
"""Tokens of a whole row that are looked at together."""


@triton.jit(do_not_specialize=["use_t", "use_k", "use_p", "vocab_size"])
def settle_kernel(
    logits, sums, listed, found, state, band, racers, weighed, row_peak, row_total, last, out,
    slots, positions, temperature, top_k, top_p, seed_lo, seed_hi, child, use_t, use_k, use_p, vocab_size, row_stride,
    pieces,
    GREEDY: tl.constexpr, PURPOSE: tl.constexpr, PIECES: tl.constexpr, DRAW: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (N,): rows with something left. A band that misses the last token, and a race that its sums do not decide,
    leave their row open: it is read for every guess, which is slow and always right. ``state`` then stays OPEN."""
    take_turn(DEPENDENT)
    row = tl.program_id(0)
    status = tl.load(state + row)
    right = status != OPEN
    if (status == LISTED) | (status == BAND):
        slot, heat, sampled, k, p = limits_of(
            row, slots, temperature, top_k, top_p, use_t, use_k, use_p, vocab_size, GREEDY, DRAW
        )
        row_found = found + row * REGIONS
        longest = tl.max(tl.load(row_found + tl.arange(0, REGIONS)), axis=0)
        banded = status == BAND
        right = (longest <= LANES) & (longest > 0)
        if right:
            position = tl.load(positions + row)
            peak = tl.load(row_peak + row)
            total = tl.load(row_total + row)
            row_logits = logits + row.to(tl.int64) * row_stride
            row_listed = listed + row.to(tl.int64) * (REGIONS * LANES)
            above = tl.full((), 0, tl.int64)
            low = above
            most = tl.full((), float("inf"), tl.float32)
            least = tl.full((), float("-inf"), tl.float32)
            if banded:
                over_it = tl.load(sums + row * REGIONS + tl.arange(0, REGIONS))
                above = (tl.sum(over_it.to(tl.float64), axis=0) * UNIT).to(tl.int64)
                least = tl.load(band + row * 2)
                most = tl.load(band + row * 2 + 1)
                low = (rank_of(tempered(least, peak, heat), tl.full((), 0, tl.int32)) >> 31) << 31
            enough = longest > 0
            if longest <= NARROW:
                low, enough = least_of(entries(row_listed, row_found, 0, NARROW), k, p, above, total, low, peak, heat)
            elif longest <= WIDE:
                low, enough = least_of(entries(row_listed, row_found, 0, WIDE), k, p, above, total, low, peak, heat)
            else:
                low, enough, _, _ = settle_long(
                    row_logits, row_listed, row_found, longest, k, p, above, total, peak, heat, slot, position, seed_lo,
                    seed_hi, child, PURPOSE, True, LONG, False,
                )  # fmt: skip
            if banded:
                # Dividing may make equals of what lies on two sides of the band's edge: then ids decide among both.
                over = reached(above, total, p) & (most < float("inf"))
                edge = tempered(most, peak, heat) <= logit_of(low)
                under = (enough == 0) & (least > float("-inf"))
                under = under | ((least > float("-inf")) & (tempered(least, peak, heat) >= logit_of(low)))
                right = (over == 0) & (edge == 0) & (under == 0)
            if right:
                tl.store(last + row, low)
                if DRAW:
                    best = tl.full((), float("-inf"), tl.float32)
                    winner = tl.full((), 2147483647, tl.int32)
                    _, winner = draw_listed(
                        row_listed, row_found, longest, low, best, winner, peak, heat, slot, position, seed_lo, seed_hi,
                        child, PURPOSE, LONG,
                    )  # fmt: skip
                    tl.store(out + row, winner.to(tl.int64))
    elif status == RACED:
        _, _, _, _, p = limits_of(row, slots, temperature, top_k, top_p, use_t, use_k, use_p, vocab_size, GREEDY, DRAW)
        winner = end_race(weighed, racers, tl.load(row_total + row), p, row, pieces, PIECES)
        tl.store(out + row, winner.to(tl.int64))
        right = winner >= 0
    if status != DONE:
        tl.store(state + row, tl.where(right, DONE, OPEN).to(tl.int32))
    if right == 0:
        slot, heat, _, k, p = limits_of(
            row, slots, temperature, top_k, top_p, use_t, use_k, use_p, vocab_size, GREEDY, DRAW
        )
        low, _, _, winner = settle_long(
            logits + row.to(tl.int64) * row_stride, last, last, vocab_size, k, p, tl.full((), 0, tl.int64),
            tl.full((), 1.0, tl.float64), tl.load(row_peak + row), heat, slot, tl.load(positions + row), seed_lo,
            seed_hi, child, PURPOSE, False, BLOCK, DRAW,
        )  # fmt: skip
        tl.store(last + row, low)
        if DRAW:
            tl.store(out + row, winner.to(tl.int64))
