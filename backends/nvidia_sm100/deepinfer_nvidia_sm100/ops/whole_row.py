"""Rows that no list holds: thousands of equals, or thousands of tokens to stay by number. Slow, and always right."""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import take_turn
from .long_list import settle_long
from .ranks import limits_of
from .shortlist import OPEN


@triton.jit(do_not_specialize=["use_t", "use_k", "use_p", "vocab_size"])
def whole_row_kernel(
    logits, state, row_peak, last, out,
    slots, positions, temperature, top_k, top_p, seed_lo, seed_hi, child, use_t, use_k, use_p, vocab_size, row_stride,
    GREEDY: tl.constexpr, PURPOSE: tl.constexpr, BLOCK: tl.constexpr, DRAW: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (N,): rows left open."""
    take_turn(DEPENDENT)
    row = tl.program_id(0)
    if tl.load(state + row) == OPEN:
        slot, heat, sampled, k, p = limits_of(
            row, slots, temperature, top_k, top_p, use_t, use_k, use_p, vocab_size, GREEDY, DRAW
        )
        peak = tl.load(row_peak + row)
        row_logits = logits + row.to(tl.int64) * row_stride
        position = tl.load(positions + row)
        nothing = tl.full((), 0, tl.int64)
        low, _, _, winner = settle_long(
            row_logits, last, last, vocab_size, k, p, nothing, tl.full((), 1.0, tl.float64), peak, heat, slot, position,
            seed_lo, seed_hi, child, PURPOSE, False, BLOCK, DRAW,
        )  # fmt: skip
        tl.store(last + row, low)
        if DRAW:
            tl.store(out + row, winner.to(tl.int64))
