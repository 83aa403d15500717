"""The first reading of a row: what each group of tokens holds at most, and what softmax needs of each part."""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import let_next_in, wait_turn
from .groups import PART, RUNS
from .noise import philox
from .ranks import limits_of, raced

LN2 = tl.constexpr(0.6931471805599453)
LEVELS = tl.constexpr(3)
"""Of :mod:`.levels`, so many are used."""


@triton.jit
def larger(a, b):
    """The larger of two, a NaN if there is one."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def quads(x, COUNT: tl.constexpr):
    """Every fourth number from the first, second, third and fourth on: no thread needs another's."""
    even, odd = tl.split(tl.reshape(x, (COUNT // 4, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def bound_part(value, word, heat):
    """:func:`.noise.bound_of` with its constant left out, times the divisor, and the logit."""
    bits = word.to(tl.float32).to(tl.int32, bitcast=True).to(tl.float32)
    return value - bits * (heat * (LN2 / 8388608.0))


@triton.jit
def words_of(first, position, seed_lo, seed_hi, child, PURPOSE: tl.constexpr):
    """The words of PART tokens, four by four."""
    stream = position * 3 + PURPOSE
    quad = (tl.arange(0, PART // 4) + first // 4).to(tl.uint32)
    zero = quad * 0
    return philox(
        quad, child.to(tl.uint32) + zero, (stream & 0xFFFFFFFF).to(tl.uint32) + zero,
        (stream >> 32).to(tl.uint32) + zero, seed_lo.to(tl.uint32) + zero, seed_hi.to(tl.uint32) + zero,
    )  # fmt: skip


@triton.jit
def weights_of(x0, x1, x2, x3, top, heat):
    """Sums of four tokens' exponentials, and what times them is those from ``top`` on."""
    scale = 1.0 / (heat * LN2)
    shift = top * scale
    if tl.abs(shift) < 1e6:
        # The product's rounding is the same for all, known, and small.
        weight = (tl.exp2(tl.fma(x0, scale, -shift)) + tl.exp2(tl.fma(x1, scale, -shift))) + (
            tl.exp2(tl.fma(x2, scale, -shift)) + tl.exp2(tl.fma(x3, scale, -shift))
        )
        unit = tl.exp2(-tl.fma(top, scale, -shift))
    else:
        weight = (tl.exp2((x0 - top) * scale) + tl.exp2((x1 - top) * scale)) + (
            tl.exp2((x2 - top) * scale) + tl.exp2((x3 - top) * scale)
        )
        unit = tl.full((), 1.0, tl.float32)
    return weight, unit


@triton.jit
def added(a, a0, a1, a2, b, b0, b1, b2):
    return a + b, a0 + b0, a1 + b1, a2 + b2


@triton.jit
def part_of(given, token, first, vocab_size):
    """A part's logits, past the first-level cache: they may be asked for before the kernel waits for the one before."""
    if first + PART <= vocab_size:
        value = tl.load(given, cache_modifier=".cg")
    else:
        value = tl.load(given, mask=token < vocab_size, other=float("-inf"), cache_modifier=".cg")
    return value


@triton.jit
def over_groups(x, GROUP: tl.constexpr):
    """The largest of each group, from the largest of every four tokens."""
    return tl.reduce(tl.reduce(tl.reshape(x, (RUNS, PART // GROUP, GROUP // RUNS // 4)), 0, larger), 1, larger)


@triton.jit(do_not_specialize=["use_t", "use_k", "use_p", "vocab_size", "levelled"])
def survey_kernel(
    logits, maxima, bounds, peaks, sums, levels, tails, slots, positions, temperature, top_k, top_p, seed_lo, seed_hi,
    child, use_t, use_k, use_p, vocab_size, row_stride, levelled,
    GREEDY: tl.constexpr, PURPOSE: tl.constexpr, GROUP: tl.constexpr, DRAW: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (N, parts), of the first ``vocab_size`` logits of a row: ``peaks [N, parts]`` the largest, or a
    NaN; ``maxima [N, parts * PART / GROUP]`` logits; of rows that top-k does not cut, ``bounds`` of scores, times the
    divisor, less BOUND_SHIFT of it, and without the row's largest logit taken off; of rows that only top-p cuts,
    ``sums`` of exponentials from the part's largest on. Their bounds are what four tokens' best logit and best noise
    would give together, which is looser by some 2 and takes a third of the time. ``levelled``: :mod:`.levels` ran just
    before; then, of rows that race, ``tails [N, LEVELS, parts]``: as ``sums``, of every four tokens of which the
    largest is at or above a level."""
    let_next_in(DEPENDENT)
    if levelled == 0:
        wait_turn(DEPENDENT)
    row = tl.program_id(0)
    first = tl.program_id(1) * PART
    token = first + tl.arange(0, PART)
    given = logits + row.to(tl.int64) * row_stride + token
    if DRAW:
        value = part_of(given, token, first, vocab_size)
        tl.debug_barrier()  # or the compiler lets the row's parameters come first, one after the other
    slot, heat, sampled, k, p = limits_of(
        row, slots, temperature, top_k, top_p, use_t, use_k, use_p, vocab_size, GREEDY, DRAW
    )
    position = tl.load(positions + row)
    low = tl.load(seed_lo + slot)
    high = tl.load(seed_hi + slot)
    its_child = tl.load(child + slot)
    if DRAW | (k > 0) | (p < 1.0):
        if not DRAW:
            value = part_of(given, token, first, vocab_size)
        least = tl.zeros((PART // 4,), tl.uint32)
        if DRAW and sampled & (k == 0) & (p < 1.0):
            # Half of what there is to do, while the logits are on their way.
            w0, w1, w2, w3 = words_of(first, position, low, high, its_child, PURPOSE)
            least = tl.minimum(tl.minimum(w0, w1), tl.minimum(w2, w3))
        wait_turn(DEPENDENT)  # for the levels: what is read above was there before they were begun
        x0, x1, x2, x3 = quads(value, PART)
        place = row * tl.num_programs(1) + tl.program_id(1)
        groups = place * (PART // GROUP) + tl.arange(0, PART // GROUP)
        fourth = larger(larger(x0, x1), larger(x2, x3))
        best = over_groups(fourth, GROUP)
        top = tl.reduce(best, 0, larger)
        tl.store(maxima + groups, best)
        tl.store(peaks + place, top)
        if DRAW and sampled & (k == 0):
            if p < 1.0:
                bound = bound_part(fourth, least, heat)
            else:
                w0, w1, w2, w3 = words_of(first, position, low, high, its_child, PURPOSE)
                bound = tl.maximum(
                    tl.maximum(bound_part(x0, w0, heat), bound_part(x1, w1, heat)),
                    tl.maximum(bound_part(x2, w2, heat), bound_part(x3, w3, heat)),
                )
            tl.store(bounds + groups, over_groups(bound, GROUP))
        if (p < 1.0) & (k == 0) & (top > float("-inf")):
            weight, unit = weights_of(x0, x1, x2, x3, top, heat)
            if DRAW and raced(k, p) & (levelled != 0):
                level0 = tl.load(levels + row * 4)
                level1 = tl.load(levels + row * 4 + 1)
                level2 = tl.load(levels + row * 4 + 2)
                total, tail0, tail1, tail2 = tl.reduce(
                    (
                        weight,
                        tl.where(fourth >= level0, weight, 0.0),
                        tl.where(fourth >= level1, weight, 0.0),
                        tl.where(fourth >= level2, weight, 0.0),
                    ),
                    0,
                    added,
                )
                parts = tl.num_programs(1)
                its_tails = tails + row * (LEVELS * parts) + tl.program_id(1)
                tl.store(its_tails, tail0 * unit)
                tl.store(its_tails + parts, tail1 * unit)
                tl.store(its_tails + 2 * parts, tail2 * unit)
            else:
                total = tl.sum(weight, axis=0)
            tl.store(sums + place, total * unit)
