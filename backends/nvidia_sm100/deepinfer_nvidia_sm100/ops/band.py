"""Rows whose last token to stay lies in a band of their logits: what is above is weighed, what is inside is listed."""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import take_turn
from .long_list import settle_long
from .ranks import UNIT, best_of_groups, limits_of, logit_of, rank_of, reached, settle, tempered
from .shortlist import BAND, DONE, LISTED, OPEN
from .survey import bounds_of

FEW, LONG = tl.constexpr(2048), tl.constexpr(4096)
"""Tokens of a list that are held in registers, and read together when there are more."""


@triton.jit(do_not_specialize=["use_t", "use_k", "use_p"])
def band_kernel(
    logits, maxima, sums, listed, found, state, band, row_peak,
    slots, positions, temperature, top_k, top_p, seed_lo, seed_hi, child, use_t, use_k, use_p, vocab_size, row_stride,
    width,
    GREEDY: tl.constexpr, PURPOSE: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr, CAP: tl.constexpr,
    DRAW: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (N, parts): ``sums [N, parts]`` of what is above, ``listed [N, CAP]`` in any order, ``found [N]``; when
    tokens are drawn, ``maxima`` of the bounds of what is above."""
    take_turn(DEPENDENT)
    row = tl.program_id(0)
    if tl.load(state + row) == BAND:
        part = tl.num_programs(1) - 1 - tl.program_id(1)  # what was read last is still in the cache
        slot, heat, _, _, _ = limits_of(
            row, slots, temperature, top_k, top_p, use_t, use_k, use_p, vocab_size, GREEDY, DRAW
        )
        peak = tl.load(row_peak + row)
        least = tl.load(band + row * 2)
        most = tl.load(band + row * 2 + 1)
        first = part * PART
        token = first + tl.arange(0, PART)
        value = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=token < width, other=float("-inf"))
        value = tl.where(token < vocab_size, value, float("-inf"))
        above = value >= most
        place = row * tl.num_programs(1) + part
        weight = tl.where(above, tl.exp((value - peak) * (1.0 / heat)), 0.0)
        tl.store(sums + place, tl.sum(weight, axis=0))
        inside = (value >= least) & (value > float("-inf")) & (above == 0)
        order = tl.cumsum(inside.to(tl.int32), axis=0)
        here = tl.max(order, axis=0)
        start = tl.atomic_add(found + row, here, sem="relaxed")
        entry = start + order - 1
        tl.store(listed + row.to(tl.int64) * CAP + entry, rank_of(value, token), mask=inside & (entry < CAP))
        if DRAW:
            position = tl.load(positions + row)
            bound = bounds_of(value, first, heat, slot, position, seed_lo, seed_hi, child, PURPOSE, PART)
            bound = tl.where(above, bound, float("-inf"))
            best = tl.max(tl.reshape(bound, (PART // GROUP, GROUP)), axis=1)
            tl.store(maxima + place * (PART // GROUP) + tl.arange(0, PART // GROUP), best)


@triton.jit(do_not_specialize=["use_t", "use_k", "use_p"])
def settle_kernel(
    logits, maxima, sums, listed, found, state, band, row_peak, row_total, last, out,
    slots, positions, temperature, top_k, top_p, seed_lo, seed_hi, child, use_t, use_k, use_p, vocab_size, row_stride,
    parts,
    GREEDY: tl.constexpr, PURPOSE: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, PER_PART: tl.constexpr,
    CAP: tl.constexpr, SPLIT: tl.constexpr, DRAW: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (N,): rows with a list. A band that misses the last token leaves its row open."""
    take_turn(DEPENDENT)
    row = tl.program_id(0)
    status = tl.load(state + row)
    if (status == LISTED) | (status == BAND):
        slot, heat, sampled, k, p = limits_of(
            row, slots, temperature, top_k, top_p, use_t, use_k, use_p, vocab_size, GREEDY, DRAW
        )
        count = tl.load(found + row)
        banded = status == BAND
        right = (count <= CAP) & (count > 0)
        if right:
            position = tl.load(positions + row)
            peak = tl.load(row_peak + row)
            total = tl.load(row_total + row)
            above = tl.full((), 0, tl.int64)
            most = tl.full((), float("inf"), tl.float32)
            least = tl.full((), float("-inf"), tl.float32)
            if banded:
                part = tl.arange(0, SPLIT * PARTS)
                weighed = tl.load(sums + row * SPLIT * parts + part, mask=part < SPLIT * parts, other=0.0)
                above = (tl.sum(weighed.to(tl.float64), axis=0) * UNIT).to(tl.int64)
                least = tl.load(band + row * 2)
                most = tl.load(band + row * 2 + 1)
            row_listed = listed + row.to(tl.int64) * CAP
            low = tl.full((), 0, tl.int64)
            enough = count > 0
            best = tl.full((), float("-inf"), tl.float32)
            winner = tl.full((), 2147483647, tl.int32)
            if count <= FEW:
                low, enough, best, winner = settle(
                    row_listed, count, k, p, above, total, peak, heat, slot, position, seed_lo, seed_hi, child,
                    PURPOSE, FEW, DRAW,
                )  # fmt: skip
            else:
                low, enough, best, winner = settle_long(
                    logits, row_listed, count, k, p, above, total, peak, heat, slot, position, seed_lo, seed_hi, child,
                    PURPOSE, True, LONG, DRAW,
                )  # fmt: skip
            if banded:
                # Dividing may make equals of what lies on two sides of the band's edge: then ids decide among both.
                over = reached(above, total, p) & (most < float("inf"))
                edge = tempered(most, peak, heat) <= logit_of(low)
                under = (enough == 0) & (least > float("-inf"))
                under = under | ((least > float("-inf")) & (tempered(least, peak, heat) >= logit_of(low)))
                right = (over == 0) & (edge == 0) & (under == 0)
                if DRAW:  # noqa: SIM102 - known when compiling, the next is not
                    if right:
                        row_logits = logits + row.to(tl.int64) * row_stride
                        best, winner = best_of_groups(
                            row_logits, maxima + row.to(tl.int64) * parts * PER_PART, parts * PER_PART, most, best,
                            winner, peak, heat, sampled, slot, position, seed_lo, seed_hi, child, vocab_size, PURPOSE,
                            GROUP, PARTS * PER_PART,
                        )  # fmt: skip
            if right:
                tl.store(last + row, low)
                if DRAW:
                    tl.store(out + row, winner.to(tl.int64))
        tl.store(state + row, tl.where(right, DONE, OPEN).to(tl.int32))
