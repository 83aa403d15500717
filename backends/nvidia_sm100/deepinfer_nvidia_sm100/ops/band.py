"""Rows to be cut, whose last token to stay lies in a band of their logits.

What is above is weighed, what is inside is listed, and :mod:`.settle` goes on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import take_turn
from .lists import LANES, REGIONS, put
from .ranks import limits_of
from .states import BAND
from .survey import LN2, quads

TILE = tl.constexpr(1024)
"""Tokens that are looked at together."""


@triton.jit
def within(value, least, most):
    return ((value >= least) & (value > float("-inf")) & (value < most)).to(tl.int32)


@triton.jit(do_not_specialize=["use_t", "use_k", "use_p", "vocab_size"])
def band_kernel(
    logits, sums, listed, found, state, band, row_peak,
    slots, positions, temperature, top_k, top_p, seed_lo, seed_hi, child, use_t, use_k, use_p, vocab_size, row_stride,
    width,
    GREEDY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (N, REGIONS), each a piece of the row: ``sums [N, REGIONS]`` of what is above the band, and the piece's list
    of what is inside."""
    take_turn(DEPENDENT)
    row = tl.program_id(0)
    if tl.load(state + row) == BAND:
        region = tl.program_id(1)
        slot, heat, _, _, _ = limits_of(
            row, slots, temperature, top_k, top_p, use_t, use_k, use_p, vocab_size, GREEDY, False
        )
        peak = tl.load(row_peak + row)
        least = tl.load(band + row * 2)
        most = tl.load(band + row * 2 + 1)
        row_logits = logits + row.to(tl.int64) * row_stride
        region_listed = listed + row.to(tl.int64) * (REGIONS * LANES) + region * LANES
        column = tl.arange(0, TILE)
        tiles = tl.cdiv(vocab_size, TILE)
        first = tiles * region // REGIONS
        end = tiles * (region + 1) // REGIONS
        scale = 1.0 / (heat * LN2)
        weights = tl.zeros((TILE,), tl.float32)
        taken = tl.full((), 0, tl.int32)
        token = first * TILE + column
        value = tl.load(row_logits + token, mask=(token < width) & (first < end), other=float("-inf"))
        for tile in range(first, end):
            token = tile * TILE + column
            following = tl.load(
                row_logits + token + TILE, mask=(token + TILE < width) & (tile + 1 < end), other=float("-inf")
            )
            if tile + 1 == tiles:
                value = tl.where(token < vocab_size, value, float("-inf"))
            above = value >= most
            weights += tl.where(above, tl.exp2((value - peak) * scale), 0.0)
            x0, x1, x2, x3 = quads(value, TILE)
            n0 = within(x0, least, most)
            n1 = within(x1, least, most)
            n2 = within(x2, least, most)
            n3 = within(x3, least, most)
            each = n0 + n1 + n2 + n3
            entry = taken + tl.cumsum(each, axis=0) - each
            number = tile * TILE + tl.arange(0, TILE // 4) * 4
            put(region_listed, entry, x0, number, n0, LANES)
            put(region_listed, entry + n0, x1, number + 1, n1, LANES)
            put(region_listed, entry + n0 + n1, x2, number + 2, n2, LANES)
            put(region_listed, entry + n0 + n1 + n2, x3, number + 3, n3, LANES)
            taken += tl.sum(each, axis=0)
            value = following
        tl.store(sums + row * REGIONS + region, tl.sum(weights, axis=0))
        tl.store(found + row * REGIONS + region, taken)
