"""Rows that top-p cuts and of which one token is wanted: the winner is found, not what stays.

A draw is a race: the best score wins among what stays. Scores are bounded while the row is read, and the row's total
says how many of them exceed what: a few dozen do, and nearly all of their tokens stay. So these are scored, and asked
one after the other, the best first, whether they stay. Those do that are at or above a level whose sum is below the
limit, see :mod:`.levels`. Where few groups of tokens reach a token's logit, what is before it is summed at once. Where
many do, :mod:`.weigh` sums it in a second reading; a sample of the row says which tokens stay nearly for certain, so
that the reading is for one token, and for those ahead of it that may stay. Of those ahead that do not, the best is
summed too. Sums that do not decide, and lists that overflow, leave the row open.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import take_turn
from .groups import token_at
from .keys import key_of, value_of
from .lists import LANES, NONE, REGIONS, opened, put
from .noise import noise_of, philox, uniform_of
from .ranks import (
    BOUND_SHIFT,
    UNIT,
    limits_of,
    mass_of,
    raced,
    rank_of,
    reached,
    slack_of,
    tempered,
    total_of,
    word_of,
)
from .states import DONE, OPEN, RACED
from .survey import LEVELS, LN2, bound_part

NEAR = tl.constexpr(2.0**-18)
"""Of the total: sums that are nearer to the limit decide nothing. They are off by a tenth of this."""
SLOTS = tl.constexpr(8)
"""Places for tokens that are weighed: UNSURE of them that may stay, the last for certain; and one that must not."""
UNSURE = tl.constexpr(6)
EDGES = tl.constexpr(2 * 8 + 2)
"""Numbers of a row that is read again: :func:`edges_of` for each place, the largest logit, and what makes exponents of
distances to it."""
CLOSE = tl.constexpr(1024)
"""Of groups that reach a token's logit, so many tokens at most are summed at once."""
FIELD = tl.constexpr(256)
"""Tokens that are scored."""
AHEAD, MOST = tl.constexpr(14.0), tl.constexpr(150.0)
"""How many of the tokens scored are expected to stay; and to be scored."""
SAMPLE, BINS = tl.constexpr(1024), tl.constexpr(256)
RUN = tl.constexpr(8)
"""Neighbours read together: 32 bytes, as much as memory hands out."""
FINE = tl.constexpr(8.0)
"""Bins of the sample for each e-fold."""
DEVIATIONS = tl.constexpr(4.0)
"""By how many of its own a sample's sum may be wrong; and by what part a guess from the largest of each group."""
LOOSE = tl.constexpr(1.25)


@triton.jit
def sure_of(row_logits, peak, heat, p, total, vocab_size):
    """Two logits: what is below the first hardly stays, what is above the second nearly always does."""
    number = tl.arange(0, SAMPLE)
    runs = vocab_size // RUN
    spread = number // RUN * runs // (SAMPLE // RUN) * RUN + number % RUN
    token = tl.where(runs > SAMPLE // RUN, spread, number)
    value = tl.load(row_logits + token, mask=token < vocab_size, other=float("-inf"))
    depth = tl.minimum((peak - value) * (FINE / heat), BINS - 1.0).to(tl.int32)
    each = tl.arange(0, BINS)
    weight = tl.exp((each + 0.5) * (-1.0 / FINE)) * (vocab_size / tl.minimum(vocab_size, SAMPLE))
    share = tl.histogram(depth, BINS).to(tl.float32) * weight
    below = tl.cumsum(share, axis=0, reverse=True)
    tail = (1.0 - p) * total
    # As if each bin had one more: what is rare may not be in the sample.
    spread_of = DEVIATIONS * tl.sqrt(tl.sum(tl.where(below <= tail, (share + weight) * weight, 0.0), axis=0))
    most = tl.sum((below >= tail + spread_of).to(tl.int32), axis=0) - 1
    least = tl.sum((below > tail - spread_of).to(tl.int32), axis=0)
    return peak - heat * (least / FINE), tl.where(most < 0, float("inf"), peak - heat * (most / FINE))


@triton.jit
def reaches(logit, word, heat, least):
    return ((logit > float("-inf")) & (bound_part(logit, word, heat) >= least)).to(tl.int32)


@triton.jit
def scored(
    row_logits, row_bounds, groups, row_groups, row_listed, level, peak, base, heat, slot, position, seed_lo, seed_hi,
    child, vocab_size,
    PURPOSE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, LOOK: tl.constexpr,
):  # fmt: skip
    """Lists the tokens whose scores may exceed a level, the first FIELD of them; how many there are."""
    number = tl.arange(0, GROUPS)
    bound = tl.load(row_bounds + number, mask=number < groups, other=float("-inf"))
    least = (level - BOUND_SHIFT) * heat + base
    mine = bound >= least
    chosen = tl.sum(mine.to(tl.int32), axis=0)
    tl.store(row_groups + tl.cumsum(mine.to(tl.int32), axis=0) - 1, number, mask=mine)
    tl.debug_barrier()  # read by other threads
    taken = tl.full((), 0, tl.int32)
    stream = position * 3 + PURPOSE
    QUADS: tl.constexpr = GROUP // 4
    for start in range(0, chosen, LOOK):
        place = tl.arange(0, LOOK * QUADS)
        entry = start + place // QUADS
        token = token_at(tl.load(row_groups + entry, mask=entry < chosen, other=0), place % QUADS * 4, GROUP)
        end = tl.where(entry < chosen, vocab_size, 0)
        x0 = tl.load(row_logits + token, mask=token < end, other=float("-inf"))
        x1 = tl.load(row_logits + token + 1, mask=token + 1 < end, other=float("-inf"))
        x2 = tl.load(row_logits + token + 2, mask=token + 2 < end, other=float("-inf"))
        x3 = tl.load(row_logits + token + 3, mask=token + 3 < end, other=float("-inf"))
        zero = (token * 0).to(tl.uint32)
        w0, w1, w2, w3 = philox(
            (token // 4).to(tl.uint32), tl.load(child + slot).to(tl.uint32) + zero,
            (stream & 0xFFFFFFFF).to(tl.uint32) + zero, (stream >> 32).to(tl.uint32) + zero,
            tl.load(seed_lo + slot).to(tl.uint32) + zero, tl.load(seed_hi + slot).to(tl.uint32) + zero,
        )  # fmt: skip
        n0 = reaches(x0, w0, heat, least)
        n1 = reaches(x1, w1, heat, least)
        n2 = reaches(x2, w2, heat, least)
        n3 = reaches(x3, w3, heat, least)
        each = n0 + n1 + n2 + n3
        first = taken + tl.cumsum(each, axis=0) - each
        put(row_listed, first, x0, token, n0, FIELD)
        put(row_listed, first + n0, x1, token + 1, n1, FIELD)
        put(row_listed, first + n0 + n1, x2, token + 2, n2, FIELD)
        put(row_listed, first + n0 + n1 + n2, x3, token + 3, n3, FIELD)
        taken += tl.sum(each, axis=0)
    tl.debug_barrier()
    return taken


@triton.jit
def before_of(
    row_logits, row_groups, near, count, rank, peak, heat, vocab_size,
    GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The mass of what is before a token, which lies in groups of up to CLOSE tokens together."""
    number = tl.arange(0, GROUPS)
    tl.store(row_groups + tl.cumsum(near.to(tl.int32), axis=0) - 1, number, mask=near)
    tl.debug_barrier()
    place = tl.arange(0, CLOSE)
    entry = place // GROUP
    token = token_at(tl.load(row_groups + entry, mask=entry < count, other=0), place % GROUP, GROUP)
    inside = (entry < count) & (token < vocab_size)
    logit = tl.load(row_logits + token, mask=inside, other=float("-inf"))
    value = tempered(logit, peak, heat)
    before = inside & (logit > float("-inf")) & (rank_of(value, token) > rank)
    return tl.sum(tl.where(before, mass_of(value, tempered(peak, peak, heat)), 0), axis=0)


@triton.jit
def edges_of(logit, peak, heat):
    """The least logits that the temperature leaves as this one, and above it."""
    key = key_of(logit)
    goal = tempered(logit, peak, heat)
    reach = (peak - logit) * (2.0**-21)  # twice what rounding the difference and its quotient makes equal
    low = tl.where(heat == 1.0, key, key_of(logit - reach)) - 1
    high = key
    same = key
    above = tl.where(heat == 1.0, key, key_of(logit + reach)) + 1
    while tl.max(tl.maximum(same - low, above - high), axis=0) > 1:
        middle = low + (same - low) // 2
        equal = tempered(value_of(middle), peak, heat) >= goal
        same = tl.where(equal, middle, same)
        low = tl.where(equal, low, middle)
        middle = high + (above - high) // 2
        larger = tempered(value_of(middle), peak, heat) > goal
        above = tl.where(larger, middle, above)
        high = tl.where(larger, high, middle)
    return value_of(same), value_of(above)


@triton.jit
def race_row(
    row_logits, best, row_bounds, groups, row_groups, row_listed, row_edges, row_racers, p, total, safe, peak, heat,
    slot, position, seed_lo, seed_hi, child, vocab_size,
    PURPOSE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, LOOK: tl.constexpr,
):  # fmt: skip
    """What is left to do for a row, and its winner if that is nothing.

    If a second reading is: ``row_edges [EDGES]``, and ``row_racers [SLOTS + 2]``: ids, how many,
    and whether the last is one that must not stay. ``best [GROUPS]``: largest logits. ``total``: times UNIT.
    Tokens stay whose logit is ``safe`` or more.
    """
    base = tl.where(heat == 1.0, 0.0, peak)
    whole = (total / UNIT).to(tl.float32)
    level = tl.log(whole) - tl.log(tl.minimum(tl.full((), AHEAD, tl.float32) / p, MOST)) + (peak - base) / heat
    taken = scored(
        row_logits, row_bounds, groups, row_groups, row_listed, level - slack_of(peak, heat), peak, base, heat, slot,
        position, seed_lo, seed_hi, child, vocab_size, PURPOSE, GROUP, GROUPS, LOOK,
    )  # fmt: skip
    number = tl.arange(0, FIELD)
    given = tl.load(row_listed + number, mask=number < taken, other=-1)
    value, token, rank = opened(given, peak, heat)
    logit = (given >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    score = value - noise_of(uniform_of(word_of(token, slot, position, seed_lo, seed_hi, child, PURPOSE)))
    left = (given != -1) & (score >= level)
    place = tl.arange(0, SLOTS)
    racers = tl.full((SLOTS,), -1, tl.int32)
    count = tl.full((), 0, tl.int32)
    barred = tl.full((), -1, tl.int64)
    looser = tl.full((), -1, tl.int32)
    status = tl.full((), OPEN, tl.int32)
    winner = tl.full((), -1, tl.int32)
    least = tl.full((), float("-inf"), tl.float32)
    most = tl.full((), float("-inf"), tl.float32)
    remaining = tl.where(taken > FIELD, 0, tl.sum(left.to(tl.int32), axis=0))
    while remaining > 0:
        remaining -= 1
        here = tl.max(tl.where(left, score, float("-inf")), axis=0)
        first = tl.min(tl.where(left & (score == here), token, NONE), axis=0)
        its = left & (token == first)
        its_rank = tl.max(tl.where(its, rank, -1), axis=0)
        its_logit = tl.max(tl.where(its, logit, float("-inf")), axis=0)
        left = left & (its == 0)
        reach = tl.where(heat == 1.0, 0.0, (peak - its_logit) * (2.0**-20))
        near = best >= its_logit - reach
        reaching = tl.sum(near.to(tl.int32), axis=0)
        if its_logit - reach >= safe:
            status = tl.where((count == 0) & (barred < 0), DONE, RACED).to(tl.int32)
            winner = first
            racers = tl.where(place == count, first, racers)
            count += 1
            remaining = tl.full((), 0, tl.int32)
        elif reaching <= CLOSE // GROUP:
            before = before_of(row_logits, row_groups, near, reaching, its_rank, peak, heat, vocab_size, GROUP, GROUPS)
            if (reached(before, total, p) == 0) | (before == 0):
                status = tl.where((count == 0) & (barred < 0), DONE, RACED).to(tl.int32)
                winner = first
                racers = tl.where(place == count, first, racers)
                count += 1
                remaining = tl.full((), 0, tl.int32)
        else:
            ahead = tl.where(best > its_logit + reach, tl.exp2((best - peak) * (1.0 / (heat * LN2))), 0.0)
            at_least = tl.sum(ahead, axis=0)
            if at_least < p * whole * 1.00001:
                # Tokens are in groups as if by chance: so many are not the best of theirs.
                sure = at_least * LOOSE < p * whole * (1.0 - reaching / groups)
                if (sure == 0) & (most == float("-inf")):
                    least, most = sure_of(row_logits, peak, heat, p, whole, vocab_size)
                sure = sure | ((most > float("-inf")) & (its_logit > most))
                if (sure == 0) & (its_logit < least):
                    looser = tl.where(its_rank > barred, first, looser)
                    barred = tl.maximum(its_rank, barred)
                else:
                    status = tl.full((), RACED, tl.int32)
                    racers = tl.where(place == count, first, racers)
                    count += 1
                    if sure | (count >= UNSURE):
                        remaining = tl.full((), 0, tl.int32)
    if status == RACED:
        racers = tl.where((place == count) & (barred >= 0), looser, racers)
        mine = tl.load(row_logits + racers, mask=racers >= 0, other=0.0)
        same, above = edges_of(tl.where(racers >= 0, mine, peak), peak, heat)
        tl.store(row_edges + place, same)
        tl.store(row_edges + SLOTS + place, above)
        tl.store(row_edges + 2 * SLOTS, peak)
        tl.store(row_edges + 2 * SLOTS + 1, 1.0 / (heat * LN2))
        tl.store(row_racers + place, racers)
        tl.store(row_racers + SLOTS, count + (barred >= 0).to(tl.int32))
        tl.store(row_racers + SLOTS + 1, (barred >= 0).to(tl.int32))
    return status, winner


@triton.jit(do_not_specialize=["use_t", "use_k", "use_p", "vocab_size", "levelled"])
def race_kernel(
    logits, maxima, bounds, peaks, sums, levels, tails, groups, listed, state, edges, racers, row_peak, row_total,
    last, out,
    slots, positions, temperature, top_k, top_p, seed_lo, seed_hi, child, use_t, use_k, use_p, vocab_size, row_stride,
    levelled, parts,
    GREEDY: tl.constexpr, PURPOSE: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, PER_PART: tl.constexpr,
    LOOK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (N,): ``state [N]`` and ``out [N]`` of rows that race, and what :mod:`.weigh` goes on from."""
    take_turn(DEPENDENT)
    row = tl.program_id(0)
    number = tl.arange(0, PARTS * PER_PART)
    best = tl.load(
        maxima + row.to(tl.int64) * parts * PER_PART + number, mask=number < parts * PER_PART, other=float("-inf")
    )
    part = tl.arange(0, PARTS)
    each = tl.load(peaks + row * parts + part, mask=part < parts, other=float("-inf"))
    slot, heat, _, k, p = limits_of(
        row, slots, temperature, top_k, top_p, use_t, use_k, use_p, vocab_size, GREEDY, True
    )
    if raced(k, p):
        peak = tl.max(tl.where(each != each, float("inf"), each), axis=0)
        status = tl.full((), DONE, tl.int32)
        winner = tl.full((), -1, tl.int32)
        if (peak > float("-inf")) & (peak < float("inf")):
            total = total_of(sums + row * parts, part, each, peak, heat)
            safe = tl.full((), float("inf"), tl.float32)
            if levelled != 0:
                for level in tl.static_range(LEVELS):
                    tail = total_of(tails + row * (LEVELS * parts) + level * parts, part, each, peak, heat)
                    known = tail <= (p - NEAR) * total
                    safe = tl.minimum(safe, tl.where(known, tl.load(levels + row * 4 + level), float("inf")))
            tl.store(row_peak + row, peak)
            tl.store(row_total + row, total)
            status, winner = race_row(
                logits + row.to(tl.int64) * row_stride, best, bounds + row.to(tl.int64) * parts * PER_PART,
                parts * PER_PART, groups + row.to(tl.int64) * (PARTS * PER_PART),
                listed + row.to(tl.int64) * (REGIONS * LANES), edges + row * EDGES, racers + row * (SLOTS + 2), p,
                total, safe, peak, heat, slot, tl.load(positions + row), seed_lo, seed_hi, child, vocab_size, PURPOSE,
                GROUP, PARTS * PER_PART, LOOK,
            )  # fmt: skip
        tl.store(state + row, status)
        tl.store(last + row, tl.full((), -1, tl.int64))
        tl.store(out + row, winner.to(tl.int64))
