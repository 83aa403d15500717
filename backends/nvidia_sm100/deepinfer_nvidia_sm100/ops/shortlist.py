"""Rows of which few groups can hold what stays: those groups' tokens are listed, and the row is settled.

By numbers: as many groups as tokens may stay, those of the largest maxima, hold all of them. By probability: maxima
that together reach the limit are at least as many tokens as stay. Where maxima do not reach the limit the row is flat:
a sample of it says between which two logits the last token to stay lies, by four deviations of what the sample knows
about the tail. :mod:`.band` lists what lies between them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import take_turn
from .groups import best_of_groups, token_at
from .keys import key_of, value_of
from .lists import LANES, REGIONS, draw_listed, entries, entry_of, least_of, place_of, settle_few
from .ranks import UNIT, limits_of, raced, total_of
from .states import BAND, DONE, LISTED, OPEN

MARGIN = tl.constexpr(1.00001)
"""Of the limit that maxima must reach: more than the row's float32 sums may be off by."""
FEW, STEP, SOME = tl.constexpr(256), tl.constexpr(16), tl.constexpr(128)
"""Tokens that are compared each with each, how many at once; and entries of a region that are held in registers."""
TOGETHER = tl.constexpr(2048)
"""Tokens of groups that are looked at together."""
FLAT, ALL = tl.constexpr(512), tl.constexpr(128)
"""More groups than this are not looked at for a probability, or for all of their tokens."""
SAMPLE = tl.constexpr(4096)
RUN = tl.constexpr(8)
"""Neighbours read together: 32 bytes, as much as memory hands out."""


@triton.jit
def tail_from(value, weight, target, low, high):
    """Two logits around the one below which the weights reach ``target``."""
    for _ in range(14):
        middle = 0.5 * (low + high)
        if tl.sum(tl.where(value < middle, weight, 0.0), axis=0) <= target:
            low = middle
        else:
            high = middle
    return low, high


@triton.jit
def band_of(row_logits, peak, heat, p, total, vocab_size):
    """Lowest logit of the band, and the one above it."""
    number = tl.arange(0, SAMPLE)
    runs = vocab_size // RUN
    spread = (number // RUN).to(tl.int64) * runs // (SAMPLE // RUN) * RUN + number % RUN
    token = tl.where(runs > SAMPLE // RUN, spread, number)
    value = tl.load(row_logits + token, mask=token < vocab_size, other=float("-inf"))
    weight = tl.exp((value - peak) * (1.0 / heat))
    scale = vocab_size.to(tl.float32) / tl.minimum(vocab_size, SAMPLE).to(tl.float32)
    tail = (1.0 - p) * total / scale
    floor = peak - 30.0 * heat
    ceiling = peak + heat
    middle, _ = tail_from(value, weight, tail, floor, ceiling)
    spread_of = tl.sqrt(tl.sum(tl.where(value < middle, weight * weight, 0.0), axis=0))
    least, _ = tail_from(value, weight, tail - 4.0 * spread_of, floor, ceiling)
    low = tl.where(least > floor, least, float("-inf"))
    _, most = tail_from(value, weight, tail + 4.0 * spread_of, floor, ceiling)
    high = tl.where(most < ceiling, most, float("inf"))
    return low, high


@triton.jit(do_not_specialize=["use_t", "use_k", "use_p", "vocab_size"])
def shortlist_kernel(
    logits, maxima, bounds, peaks, sums, groups, listed, found, state, band, row_peak, row_total, last, out,
    slots, positions, temperature, top_k, top_p, seed_lo, seed_hi, child, use_t, use_k, use_p, vocab_size, row_stride,
    parts,
    GREEDY: tl.constexpr, PURPOSE: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, PER_PART: tl.constexpr,
    DRAW: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (N,): ``state [N]`` int32; ``last [N]`` the least rank that stays (-1: nothing goes) and ``out [N]`` the
    token drawn, where that is known; else what the kernels after it go on from."""
    take_turn(DEPENDENT)
    LOOK: tl.constexpr = TOGETHER // GROUP
    row = tl.program_id(0)
    slot, heat, sampled, k, p = limits_of(
        row, slots, temperature, top_k, top_p, use_t, use_k, use_p, vocab_size, GREEDY, DRAW
    )
    cut = (k > 0) | (p < 1.0)
    elsewhere = raced(k, p) if DRAW else cut < 0
    status = tl.full((), DONE, tl.int32)
    least = tl.full((), -1, tl.int64)
    winner = tl.full((), -1, tl.int32)
    if (DRAW | cut) & (elsewhere == 0):
        part = tl.arange(0, PARTS)
        each = tl.load(peaks + row * parts + part, mask=part < parts, other=float("-inf"))
        peak = tl.max(tl.where(each != each, float("inf"), each), axis=0)
        if (peak > float("-inf")) & (peak < float("inf")):
            position = tl.load(positions + row)
            row_logits = logits + row.to(tl.int64) * row_stride
            row_maxima = maxima + row.to(tl.int64) * parts * PER_PART
            row_groups = groups + row.to(tl.int64) * (PARTS * PER_PART)
            row_listed = listed + row.to(tl.int64) * (REGIONS * LANES)
            row_found = found + row * REGIONS
            if cut:
                total = tl.full((), 1.0, tl.float64)
                if k == 0:
                    total = total_of(sums + row * parts, part, each, peak, heat)
                tl.store(row_peak + row, peak)
                tl.store(row_total + row, total)
                number = tl.arange(0, PARTS * PER_PART)
                best = tl.load(row_maxima + number, mask=number < parts * PER_PART, other=float("-inf"))
                finite = best > float("-inf")
                key = tl.where(finite, key_of(best), 0).to(tl.uint32)
                low = tl.min(tl.where(finite, key, 0xFFFFFFFF).to(tl.uint32), axis=0)
                high = tl.max(key, axis=0) + 1
                chosen = tl.sum(finite.to(tl.int32), axis=0)
                flat = chosen < 0
                enough = chosen > k
                if k > 0:
                    while (chosen > tl.maximum(k, tl.cdiv(k, LOOK) * LOOK)) & (high - low > 1):
                        middle = low + (high - low) // 2
                        count = tl.sum((key >= middle).to(tl.int32), axis=0)
                        if count >= k:
                            low = middle
                            chosen = count
                        else:
                            high = middle
                else:
                    share = tl.where(finite, tl.exp((best - peak) * (1.0 / heat)), 0.0)
                    wanted = tl.minimum(p * MARGIN, 1.0) * (total / UNIT).to(tl.float32)
                    enough = tl.sum(share, axis=0) >= wanted
                    more = tl.full((), 0, tl.int32)
                    while enough & (chosen > LOOK) & (chosen - more > 1) & (high - low > 1) & (more <= FLAT):
                        middle = low + (high - low) // 2
                        count = tl.sum((key >= middle).to(tl.int32), axis=0)
                        if tl.sum(tl.where(key >= middle, share, 0.0), axis=0) >= wanted:
                            low = middle
                            chosen = count
                        else:
                            high = middle
                            more = count
                    flat = (chosen > tl.where(enough, FLAT, ALL)) | (more > FLAT)
                # Dividing may make equals of logits that differ in the last bits: then ids decide.
                limit = value_of(low)
                limit -= tl.where(heat == 1.0, 0.0, (peak - limit) * (2.0**-21))
                limit = tl.where(enough, limit, float("-inf"))
                if flat:
                    if DRAW:
                        status = tl.full((), OPEN, tl.int32)
                    else:
                        least_logit, above = band_of(
                            row_logits, peak, heat, p, (total / UNIT).to(tl.float32), vocab_size
                        )
                        tl.store(band + row * 2, least_logit)
                        tl.store(band + row * 2 + 1, above)
                        status = tl.full((), BAND, tl.int32)
                else:
                    mine = finite & (best >= limit)
                    chosen = tl.sum(mine.to(tl.int32), axis=0)
                    tl.store(row_groups + tl.cumsum(mine.to(tl.int32), axis=0) - 1, number, mask=mine)
                    tl.debug_barrier()  # read by other threads
                    taken = tl.full((), 0, tl.int32)
                    for start in range(0, chosen, LOOK):
                        flat_place = tl.arange(0, LOOK * GROUP)
                        entry = start + flat_place // GROUP
                        group = tl.load(row_groups + entry, mask=entry < chosen, other=0)
                        token = token_at(group, flat_place % GROUP, GROUP)
                        inside = (entry < chosen) & (token < vocab_size)
                        logit = tl.load(row_logits + token, mask=inside, other=float("-inf"))
                        here = (logit > float("-inf")) & (logit >= limit)
                        place = taken + tl.cumsum(here.to(tl.int32), axis=0) - 1
                        tl.store(
                            row_listed + place_of(place), entry_of(logit, token), mask=here & (place < REGIONS * LANES)
                        )
                        taken += tl.sum(here.to(tl.int32), axis=0)
                    tl.debug_barrier()
                    if taken <= FEW:
                        least, winner = settle_few(
                            row_listed, taken, k, p, total, peak, heat, slot, position, seed_lo, seed_hi, child,
                            PURPOSE, FEW, STEP, DRAW,
                        )  # fmt: skip
                    elif taken <= REGIONS * LANES:
                        region = tl.arange(0, REGIONS)
                        tl.store(row_found + region, tl.cdiv(taken - region, REGIONS))
                        if taken <= REGIONS * SOME:
                            tl.debug_barrier()
                            given = entries(row_listed, row_found, 0, SOME)
                            nothing = tl.full((), 0, tl.int64)
                            least, _ = least_of(given, k, p, nothing, total, nothing, peak, heat)
                            if DRAW:
                                _, winner = draw_listed(
                                    row_listed, row_found, tl.cdiv(taken, REGIONS), least,
                                    tl.full((), float("-inf"), tl.float32), tl.full((), 2147483647, tl.int32), peak,
                                    heat, slot, position, seed_lo, seed_hi, child, PURPOSE, FEW // REGIONS,
                                )  # fmt: skip
                        else:
                            status = tl.full((), LISTED, tl.int32)
                    else:
                        status = tl.full((), OPEN, tl.int32)
            else:
                row_bounds = bounds + row.to(tl.int64) * parts * PER_PART
                _, winner = best_of_groups(
                    row_logits, tl.where(sampled, row_bounds, row_maxima), parts * PER_PART, peak, heat, sampled, slot,
                    position, seed_lo, seed_hi, child, vocab_size, PURPOSE, GROUP, PARTS * PER_PART,
                )  # fmt: skip
    if elsewhere == 0:
        tl.store(state + row, status)
        tl.store(last + row, least)
        if DRAW:
            tl.store(out + row, winner.to(tl.int64))
