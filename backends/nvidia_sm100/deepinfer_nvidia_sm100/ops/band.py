"""Rows whose last token to stay lies in a band of their logits: what is above is weighed, what is inside is listed."""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import take_turn
from .lists import LANES, REGIONS, draw_listed, entries, entry_of, least_of
from .long_list import settle_long
from .ranks import UNIT, best_of_groups, limits_of, logit_of, rank_of, reached, tempered
from .shortlist import BAND, DONE, LISTED, OPEN
from .survey import bounds_of

NARROW, WIDE, LONG = tl.constexpr(128), tl.constexpr(512), tl.constexpr(64)
"""Entries of a region that are held in registers, and read together when there are more."""
TILE = tl.constexpr(512)
"""Tokens that are looked at together."""


@triton.jit(do_not_specialize=["use_t", "use_k", "use_p", "vocab_size"])
def band_kernel(
    logits, maxima, sums, listed, found, state, band, row_peak,
    slots, positions, temperature, top_k, top_p, seed_lo, seed_hi, child, use_t, use_k, use_p, vocab_size, row_stride,
    width, groups,
    GREEDY: tl.constexpr, PURPOSE: tl.constexpr, GROUP: tl.constexpr, DRAW: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (N, REGIONS), each a piece of the row: ``sums [N, REGIONS]`` of what is above the band, the piece's list, in
    any order, of what is inside; when tokens are drawn, ``maxima [N, groups]``, bounds of the scores above."""
    take_turn(DEPENDENT)
    row = tl.program_id(0)
    if tl.load(state + row) == BAND:
        region = tl.program_id(1)
        slot, heat, _, _, _ = limits_of(
            row, slots, temperature, top_k, top_p, use_t, use_k, use_p, vocab_size, GREEDY, DRAW
        )
        position = tl.load(positions + row)
        low = tl.load(seed_lo + slot)
        high = tl.load(seed_hi + slot)
        its_child = tl.load(child + slot)
        peak = tl.load(row_peak + row)
        least = tl.load(band + row * 2)
        most = tl.load(band + row * 2 + 1)
        row_logits = logits + row.to(tl.int64) * row_stride
        region_listed = listed + row.to(tl.int64) * (REGIONS * LANES) + region * LANES
        column = tl.arange(0, TILE)
        tiles = tl.cdiv(vocab_size, TILE)
        each = tl.cdiv(tiles, REGIONS)
        first = region * each
        end = tl.minimum(first + each, tiles)
        weights = tl.zeros((TILE,), tl.float32)
        counter = found + row * REGIONS + region + column * 0
        value = tl.load(
            row_logits + first * TILE + column,
            mask=(first * TILE + column < width) & (first < end),
            other=float("-inf"),
        )
        for tile in range(first, end):
            token = column + tile * TILE
            following = tl.load(
                row_logits + token + TILE, mask=(token + TILE < width) & (tile + 1 < end), other=float("-inf")
            )
            value = tl.where(token < vocab_size, value, float("-inf"))
            above = value >= most
            weights += tl.where(above, tl.exp((value - peak) * (1.0 / heat)), 0.0)
            inside = (value >= least) & (value > float("-inf")) & (above == 0)
            entry = tl.atomic_add(counter, 1, mask=inside, sem="relaxed")
            tl.store(region_listed + entry, entry_of(value, token), mask=inside & (entry < LANES))
            if DRAW:
                bound = bounds_of(value, tile * TILE, heat, position, low, high, its_child, PURPOSE, TILE)
                bound = tl.where(above, bound, float("-inf"))
                best = tl.max(tl.reshape(bound, (TILE // GROUP, GROUP)), axis=1)
                place = tl.arange(0, TILE // GROUP) + tile * (TILE // GROUP)
                tl.store(maxima + row.to(tl.int64) * groups + place, best)
            value = following
        tl.store(sums + row * REGIONS + region, tl.sum(weights, axis=0))


@triton.jit(do_not_specialize=["use_t", "use_k", "use_p", "vocab_size"])
def settle_kernel(
    logits, maxima, sums, listed, found, state, band, row_peak, row_total, last, out,
    slots, positions, temperature, top_k, top_p, seed_lo, seed_hi, child, use_t, use_k, use_p, vocab_size, row_stride,
    groups,
    GREEDY: tl.constexpr, PURPOSE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, DRAW: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (N,): rows with a list. A band that misses the last token leaves its row open."""
    take_turn(DEPENDENT)
    row = tl.program_id(0)
    status = tl.load(state + row)
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
                weighed = tl.load(sums + row * REGIONS + tl.arange(0, REGIONS))
                above = (tl.sum(weighed.to(tl.float64), axis=0) * UNIT).to(tl.int64)
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
                    if banded:
                        best, winner = best_of_groups(
                            row_logits, maxima + row.to(tl.int64) * groups, groups, most, best, winner, peak, heat,
                            sampled, slot, position, seed_lo, seed_hi, child, vocab_size, PURPOSE, GROUP, GROUPS,
                        )  # fmt: skip
                    _, winner = draw_listed(
                        row_listed, row_found, longest, low, best, winner, peak, heat, slot, position, seed_lo, seed_hi,
                        child, PURPOSE, LONG,
                    )  # fmt: skip
                    tl.store(out + row, winner.to(tl.int64))
        tl.store(state + row, tl.where(right, DONE, OPEN).to(tl.int32))
