"""The last token of a row that top-k or top-p keeps: its key, and the highest id of that key that stays.

One program a row counts, or weighs, the candidates at or above eight keys at once and goes on between the two keys
where the limit is reached, until few are left, whose order is settled pair by pair. Probabilities are float32, their
sums float64 over float32 sums of a few dozen, always in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import take_turn
from .keys import LEAST_KEY, OTHERS, at, at_or_above, key_of, reaches, softmax_of, value_of

FEW = 256
"""Candidates whose order is settled pair by pair."""
LISTS, LANES = 8, 128
"""Lists, and entries of each, looked at together."""
WAYS = tl.constexpr(8)
EVERY_ID = tl.constexpr(2147483647)


@triton.jit
def piece(
    row_logits, row_values, row_found, number, vocab_size, parts, most,
    ROW: tl.constexpr, CAP: tl.constexpr, LISTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """1,024 tokens of the row or candidates of its lists: values, where they lie, and which are real."""
    flat = tl.arange(0, LISTS * LANES)
    if ROW:
        place = number * (LISTS * LANES) + flat
        real = place < vocab_size
        value = tl.load(row_logits + place, mask=real, other=float("-inf"))
    else:
        across = tl.cdiv(most, LANES)
        of_list = (number // across) * LISTS + flat // LANES
        entry = (number % across) * LANES + flat % LANES
        real = entry < tl.load(row_found + of_list, mask=of_list < parts, other=0)
        place = of_list * CAP + entry
        value = tl.load(row_values + place, mask=real, other=float("-inf"))
    return value, place, real


@triton.jit
def search(
    row_logits, row_values, row_offsets, row_found, keys, ids, bound, low, peak, top, total, pieces, vocab_size, parts,
    most,
    ROW: tl.constexpr, MASS: tl.constexpr, PART: tl.constexpr, CAP: tl.constexpr, FEW: tl.constexpr,
    LISTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Narrows the keys ``low..high`` (exclusive) among which the last kept one is.

    Returns low, high, the tokens and the probability from ``high`` on, the tokens inside, and whether those from
    ``low`` on reach the limit at all. Up to FEW tokens inside are left in ``keys`` and ``ids [FEW]``.
    """
    high = peak + 1
    more = tl.full((), 0, tl.int32)
    mass_above = tl.full((), 0.0, tl.float64)
    inside = tl.full((), 2147483647, tl.int32)
    reached_at_all = tl.full((), 1, tl.int32)
    turn = tl.full((), 0, tl.int32)
    while (inside > FEW) & ((high - low > 1) | (turn == 0)):
        width = tl.maximum(tl.cdiv(high - low, WAYS), 1)
        counts = tl.zeros((LISTS * LANES, WAYS), tl.int32)
        masses = tl.zeros((LISTS * LANES, WAYS), tl.float32)
        for number in range(pieces):
            value, place, real = piece(
                row_logits, row_values, row_found, number, vocab_size, parts, most, ROW, CAP, LISTS, LANES
            )
            above = at_or_above(key_of(value), real, low, width, WAYS)
            counts += above.to(tl.int32)
            if MASS:
                masses += tl.where(above, tl.div_rn(tl.exp(value - top), total)[:, None], 0.0)
        count = tl.sum(counts, axis=0)
        mass = tl.zeros((WAYS,), tl.float64)
        if MASS:
            mass = tl.sum(masses.to(tl.float64), axis=0)
        reached = reaches(count, mass, bound, MASS)
        held = tl.max(tl.where(reached, tl.arange(0, WAYS), -1), axis=0)
        reached_at_all = (held >= 0).to(tl.int32)
        held = tl.maximum(held, 0)
        if (held < WAYS - 1) & (low + (held + 1) * width < high):
            high = low + (held + 1) * width
            more = at(count, held + 1, WAYS)
            mass_above = at(mass, held + 1, WAYS)
        low = low + held * width
        inside = tl.where(reached_at_all == 1, at(count, held, WAYS) - more, 0)
        turn += 1
    if inside <= FEW:
        taken = tl.full((), 0, tl.int32)
        for number in range(pieces):
            value, place, real = piece(
                row_logits, row_values, row_found, number, vocab_size, parts, most, ROW, CAP, LISTS, LANES
            )
            key = key_of(value).to(tl.int64)
            mine = real & (key >= low) & (key < high)
            here = tl.sum(mine.to(tl.int32), axis=0)
            if here > 0:
                slot = taken + tl.cumsum(mine.to(tl.int32), axis=0) - 1
                identity = place
                if not ROW:
                    identity = place // CAP * PART + tl.load(row_offsets + place, mask=mine, other=0).to(tl.int32)
                tl.store(keys + slot, key, mask=mine & (slot < FEW))
                tl.store(ids + slot, identity, mask=mine & (slot < FEW))
            taken += here
    return low, high, more, mass_above, inside, reached_at_all


@triton.jit
def settle(keys, ids, bound, high, more, mass_above, inside, top, total, MASS: tl.constexpr, FEW: tl.constexpr):
    """Last key and highest id kept of the FEW tokens inside: each against each."""
    number = tl.arange(0, FEW)
    real = number < inside
    key = tl.load(keys + number, mask=real, other=0)
    identity = tl.load(ids + number, mask=real, other=0)
    rank = tl.zeros((FEW,), tl.int32)
    before = tl.zeros((FEW,), tl.float64)
    for start in range(0, inside, 16):
        other = start + tl.arange(0, 16)
        its_key = tl.load(keys + other, mask=other < inside, other=-1)
        its_id = tl.load(ids + other, mask=other < inside, other=0)
        better = (its_key[None, :] > key[:, None]) | (
            (its_key[None, :] == key[:, None]) & (its_id[None, :] < identity[:, None])
        )
        rank += tl.sum((better & (other < inside)[None, :]).to(tl.int32), axis=1)
        if MASS:
            share = tl.div_rn(tl.exp(value_of(its_key.to(tl.uint32)) - top), total)
            share = tl.where(other < inside, share, 0.0).to(tl.float64)
            before += tl.sum(tl.where(better, share[None, :], 0.0), axis=1)
    stays = real & (reaches(more + rank, mass_above + before, bound, MASS) == 0)
    last = tl.min(tl.where(stays, key, high), axis=0)
    last_id = tl.max(tl.where(stays & (key == last), identity, -1), axis=0)
    return last, tl.where(last == high, EVERY_ID, last_id)


@triton.jit
def last_equal(
    row_logits, last, single, bound, more, mass_above, top, total, vocab_size,
    MASS: tl.constexpr, LISTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Of many tokens of one key, the highest id that stays: read from the row, in the order of ids."""
    last_id = tl.full((), -1, tl.int32)
    taken = tl.full((), 0, tl.int32)
    for start in range(0, vocab_size, LISTS * LANES):
        token = start + tl.arange(0, LISTS * LANES)
        inside = token < vocab_size
        value = tl.load(row_logits + token, mask=inside, other=float("-inf"))
        mine = inside & (key_of(value).to(tl.int64) == last)
        rank = taken + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        mass = tl.zeros((LISTS * LANES,), tl.float64)
        if MASS:
            mass = mass_above + rank.to(tl.float64) * tl.div_rn(tl.exp(value - top), total).to(tl.float64)
        beyond = tl.where(single, rank >= 1, reaches(more + rank, mass, bound, MASS))
        last_id = tl.maximum(last_id, tl.max(tl.where(mine & (beyond == 0), token, -1), axis=0))
        taken += tl.sum(mine.to(tl.int32), axis=0)
    return last_id


@triton.jit
def last_kept_kernel(
    logits, guess, peaks, sums, found, values, offsets, few_keys, few_ids, state, slots, limit, vocab_size, row_stride,
    parts,
    MASS: tl.constexpr, PART: tl.constexpr, CAP: tl.constexpr, FEW: tl.constexpr, LISTS: tl.constexpr,
    LANES: tl.constexpr, PARTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (N,): ``state [N, 2]`` int64, the last key that stays (-1: nothing goes) and its highest id that stays.

    Rows whose state is not OTHERS have it already.
    """
    take_turn(DEPENDENT)
    row = tl.program_id(0)
    bound = tl.load(limit + tl.load(slots + row))
    if tl.load(state + row * 2) == OTHERS:
        part = tl.arange(0, PARTS)
        most = tl.max(tl.load(found + row * parts + part, mask=part < parts, other=0), axis=0)
        peak, top, total = softmax_of(peaks, sums, row, parts, MASS, PARTS)
        single = peak < 0
        if MASS:
            # A NaN or +inf makes all of the row NaN; a limit of nothing keeps the best.
            single = (bound <= 0.0) | (total != total)
        row_logits = logits + row.to(tl.int64) * row_stride
        row_values = values + row.to(tl.int64) * parts * CAP
        row_offsets = offsets + row.to(tl.int64) * parts * CAP
        row_found = found + row * parts
        keys = few_keys + row * FEW
        ids = few_ids + row * FEW
        last = tl.full((), -1, tl.int64)
        last_id = tl.full((), -1, tl.int32)
        if single:
            last = peak
            last_id = last_equal(row_logits, last, single, bound, 0, 0.0, top, total, vocab_size, MASS, LISTS, LANES)
        elif peak >= LEAST_KEY:
            low = tl.load(guess + row)
            high = peak
            more = tl.full((), 0, tl.int32)
            mass_above = tl.full((), 0.0, tl.float64)
            inside = tl.full((), 0, tl.int32)
            enough = tl.full((), 0, tl.int32)
            guessed = low
            if (most <= CAP) & (most > 0):
                pieces = tl.cdiv(parts, LISTS) * tl.cdiv(most, LANES)
                low, high, more, mass_above, inside, enough = search(
                    row_logits, row_values, row_offsets, row_found, keys, ids, bound, low, peak, top, total, pieces,
                    vocab_size, parts, most, False, MASS, PART, CAP, FEW, LISTS, LANES,
                )  # fmt: skip
            if (enough == 0) & ((guessed > LEAST_KEY) | (most > CAP)):
                pieces = tl.cdiv(vocab_size, LISTS * LANES)
                low, high, more, mass_above, inside, enough = search(
                    row_logits, row_values, row_offsets, row_found, keys, ids, bound, tl.full((), LEAST_KEY, tl.int64),
                    peak, top, total, pieces, vocab_size, parts, most, True, MASS, PART, CAP, FEW, LISTS, LANES,
                )  # fmt: skip
            if enough == 1:
                if inside > FEW:
                    last = low
                    last_id = last_equal(
                        row_logits, last, single, bound, more, mass_above, top, total, vocab_size, MASS, LISTS, LANES
                    )
                else:
                    tl.debug_barrier()  # keys and ids were written by other threads
                    last, last_id = settle(keys, ids, bound, high, more, mass_above, inside, top, total, MASS, FEW)
        tl.store(state + row * 2, last)
        tl.store(state + row * 2 + 1, last_id.to(tl.int64))
