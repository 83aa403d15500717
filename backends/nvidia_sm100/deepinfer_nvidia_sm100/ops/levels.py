"""Logits of a row above which nearly all that top-p keeps lies, guessed from a sample before the row is read.

:mod:`.survey` sums what is at or above them, :mod:`.race` sees which of these sums stay below top-p's limit: a token at
or above such a level stays for certain, and its row is not read again. A guess that is wrong costs that reading.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import let_next_in, wait_turn
from .ranks import limits_of, raced
from .survey import LN2, quads

SAMPLE = tl.constexpr(1024)
RUN = tl.constexpr(8)
"""Neighbours read together: 32 bytes, as much as memory hands out."""
LEAST, GROWTH = tl.constexpr(1.1), tl.constexpr(1.7)
"""What is below the lowest level, of what top-p removes, and by how much more from level to level. A sample of a row
with few likely tokens misses most of its mass, so that its levels are too low."""
DEPTH, HALVINGS = tl.constexpr(32.0), tl.constexpr(12)


@triton.jit(do_not_specialize=["use_t", "use_k", "use_p", "vocab_size"])
def levels_kernel(
    logits, levels, slots, positions, temperature, top_k, top_p, seed_lo, seed_hi, child, use_t, use_k, use_p,
    vocab_size, row_stride,
    GREEDY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (N,): ``levels [N, 4]``, ascending, of rows that race; the first :data:`.survey.LEVELS` are used."""
    # In this order: what earlier kernels wrote is there for the next one too, which reads logits before it waits.
    wait_turn(DEPENDENT)
    let_next_in(DEPENDENT)
    row = tl.program_id(0)
    number = tl.arange(0, SAMPLE)
    runs = vocab_size // RUN
    spread = number // RUN * runs // (SAMPLE // RUN) * RUN + number % RUN
    token = tl.where(runs > SAMPLE // RUN, spread, number)
    value = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=token < vocab_size, other=float("-inf"))
    _, heat, _, k, p = limits_of(row, slots, temperature, top_k, top_p, use_t, use_k, use_p, vocab_size, GREEDY, True)
    if raced(k, p):
        x0, x1, x2, x3 = quads(value, SAMPLE)
        fourth = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
        peak = tl.max(fourth, axis=0)
        scale = 1.0 / (heat * LN2)
        weight = (tl.exp2((x0 - peak) * scale) + tl.exp2((x1 - peak) * scale)) + (
            tl.exp2((x2 - peak) * scale) + tl.exp2((x3 - peak) * scale)
        )
        each = tl.arange(0, 4)
        share = LEAST * tl.exp2(each * tl.log2(tl.full((4,), GROWTH, tl.float32)))
        goal = tl.minimum((1.0 - p) * share, 0.99) * tl.sum(weight, axis=0)
        low = peak - DEPTH * heat + tl.zeros((4,), tl.float32)
        high = peak + tl.zeros((4,), tl.float32)
        for _halving in range(HALVINGS):
            middle = 0.5 * (low + high)
            below = tl.sum(tl.where(fourth[:, None] < middle[None, :], weight[:, None], 0.0), axis=0) >= goal
            high = tl.where(below, middle, high)
            low = tl.where(below, low, middle)
        tl.store(levels + row * 4 + each, high)
