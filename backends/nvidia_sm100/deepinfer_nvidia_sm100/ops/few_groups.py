"""Rows of which few groups can hold what stays: those groups' tokens are searched, all in registers.

By numbers: as many groups as tokens may stay, those of the largest maxima, hold all of them. By probability: the maxima
that together reach the limit are at least as many tokens as stay, and what stays is not below the last of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import take_turn
from .keys import LEAST_KEY, OTHERS, cuts, key_of, reaches, softmax_of, value_of
from .last_kept import settle

MARGIN = tl.constexpr(1.00001)
"""Of the limit that maxima must reach: more than their float32 sum may be off by."""


@triton.jit
def held_by(key, share, inside, least, MASS: tl.constexpr):
    """Number, and probability, of what has at least this key."""
    above = inside & (key >= least.to(tl.uint32))
    mass = tl.full((), 0.0, tl.float64)
    if MASS:
        mass = tl.sum(tl.where(above, share, 0.0).to(tl.float64), axis=0)
    return tl.sum(above.to(tl.int32), axis=0), mass


@triton.jit
def few_groups_kernel(
    logits, maxima, peaks, sums, groups, few_keys, few_ids, state, slots, limit, vocab_size, row_stride, parts,
    MASS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, FEW: tl.constexpr, PER_PART: tl.constexpr,
    PARTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (N,): ``state [N, 2]`` as :func:`.last_kept.last_kept_kernel` leaves it, or OTHERS first."""
    take_turn(DEPENDENT)
    row = tl.program_id(0)
    bound = tl.load(limit + tl.load(slots + row))
    last = tl.full((), -1, tl.int64)
    last_id = tl.full((), -1, tl.int32)
    if cuts(bound, vocab_size, MASS):
        peak, top, total = softmax_of(peaks, sums, row, parts, MASS, PARTS)
        last = tl.full((), OTHERS, tl.int64)
        usual = peak >= LEAST_KEY
        if MASS:
            usual = usual & (bound > 0.0) & (total == total)
        if usual:
            number = tl.arange(0, PARTS * PER_PART)
            real = number < parts * PER_PART
            place = maxima + row.to(tl.int64) * parts * PER_PART + number
            best = tl.load(place, mask=real, other=0).to(tl.uint32, bitcast=True)
            share = best.to(tl.float32)
            wanted = bound
            if MASS:
                share = tl.div_rn(tl.exp(value_of(best) - top), total)
                wanted = tl.minimum(bound * MARGIN, 1.0)
            low = tl.full((), LEAST_KEY, tl.int64)
            high = peak + 1
            held_groups, mass = held_by(best, share, real, low, MASS)
            enough = reaches(held_groups, mass, wanted, MASS)
            while (held_groups > GROUPS) & (high - low > 1) & enough:
                middle = low + (high - low) // 2
                count, mass = held_by(best, share, real, middle, MASS)
                if reaches(count, mass, wanted, MASS):
                    low = middle
                    held_groups = count
                else:
                    high = middle
            if enough & (held_groups <= GROUPS):
                mine = real & (best >= low.to(tl.uint32))
                slot = tl.cumsum(mine.to(tl.int32), axis=0) - 1
                tl.store(groups + row * GROUPS + slot, number, mask=mine & (slot < GROUPS))
                tl.debug_barrier()  # read by other threads
                entry = tl.arange(0, GROUPS * GROUP) // GROUP
                group = tl.load(groups + row * GROUPS + entry, mask=entry < held_groups, other=0)
                token = group * GROUP + tl.arange(0, GROUPS * GROUP) % GROUP
                inside_row = (entry < held_groups) & (token < vocab_size)
                value = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=inside_row, other=float("-inf"))
                key = key_of(value)
                each = value
                if MASS:
                    each = tl.div_rn(tl.exp(value - top), total)
                high = peak + 1
                more = tl.full((), 0, tl.int32)
                mass_above = tl.full((), 0.0, tl.float64)
                held, mass = held_by(key, each, inside_row, low, MASS)
                while (held - more > FEW) & (high - low > 1):
                    middle = low + (high - low) // 2
                    count, mass = held_by(key, each, inside_row, middle, MASS)
                    if reaches(count, mass, bound, MASS):
                        low = middle
                        held = count
                    else:
                        high = middle
                        more = count
                        mass_above = mass
                inside = held - more
                if inside <= FEW:
                    wide = key.to(tl.int64)
                    kept = inside_row & (wide >= low) & (wide < high)
                    order = tl.cumsum(kept.to(tl.int32), axis=0) - 1
                    tl.store(few_keys + row * FEW + order, wide, mask=kept & (order < FEW))
                    tl.store(few_ids + row * FEW + order, token, mask=kept & (order < FEW))
                    tl.debug_barrier()
                    last, last_id = settle(
                        few_keys + row * FEW, few_ids + row * FEW, bound, high, more, mass_above, inside, top, total,
                        MASS, FEW,
                    )  # fmt: skip
    tl.store(state + row * 2, last)
    tl.store(state + row * 2 + 1, last_id.to(tl.int64))
