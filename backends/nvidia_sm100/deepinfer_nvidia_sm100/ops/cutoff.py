"""Where a row is cut by top-k or top-p, without sorting it.

Logits become unsigned integers of the same order. The key of the last token that stays is found four bits at a time,
from the highest: a pass over the row compares it with fifteen keys at once and adds up how many tokens, or how much
probability, lie at or above each. A last pass removes what is below, and, of the tokens that equal the last one, those
with the highest ids.

Floor: bytes, 8·N·V. Here the row is read ten times, from the cache while a row of 0.5 MB or so fits there.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def key_of(value):
    """float32 as uint32 of the same order. -0.0 equals 0.0; NaNs are largest."""
    bits = (value + 0.0).to(tl.uint32, bitcast=True)
    key = tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(value != value, 0xFFFFFFFF, key)


@triton.jit
def cutoff_kernel(
    logits,
    slots,
    limit,
    vocab_size,
    row_stride,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (N,), in place. ``limit``: top_k ``[S]`` int64, or with MASS top_p ``[S]`` float32."""
    row = tl.program_id(0)
    bound = tl.load(limit + tl.load(slots + row))
    if MASS:
        cuts = bound < 1.0
    else:
        cuts = (bound > 0) & (bound < vocab_size)
    if cuts:
        base = logits + row.to(tl.int64) * row_stride
        column = tl.arange(0, BLOCK)
        digit = tl.arange(0, 16)
        peak = tl.full((BLOCK,), float("-inf"), tl.float32)
        total = tl.full((), 1.0, tl.float32)
        for start in range(0, vocab_size, BLOCK):
            value = tl.load(base + start + column, mask=start + column < vocab_size, other=float("-inf"))
            peak = tl.maximum(peak, value)
        top = tl.max(peak, axis=0)
        if MASS:
            sums = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, vocab_size, BLOCK):
                value = tl.load(base + start + column, mask=start + column < vocab_size, other=float("-inf"))
                sums += tl.exp(value - top)
            total = tl.sum(sums, axis=0)
        highest = key_of(top)
        last = tl.full((), 0, tl.uint32)
        for turn in tl.static_range(8):
            shift = 28 - 4 * turn
            keys = last + (digit.to(tl.uint32) << shift)
            if MASS:
                reached = tl.zeros((16,), tl.float64)
            else:
                reached = tl.zeros((16,), tl.int32)
            for start in range(0, vocab_size, BLOCK):
                inside = start + column < vocab_size
                value = tl.load(base + start + column, mask=inside, other=float("-inf"))
                above = (key_of(value)[:, None] >= keys[None, :]) & inside[:, None]
                if MASS:
                    share = tl.div_rn(tl.exp(value - top), total).to(tl.float64)
                    reached += tl.sum(tl.where(above, share[:, None], 0.0), axis=0)
                else:
                    reached += tl.sum(above.to(tl.int32), axis=0)
            if MASS:
                enough = reached.to(tl.float32) >= bound
            else:
                enough = reached >= bound
            # Digit 0 always holds; sums fall as keys rise, so the last that holds is the number that hold, less one.
            held = tl.maximum(tl.sum(enough.to(tl.int32), axis=0) - 1, 0)
            last = last + (held.to(tl.uint32) << shift)
        last = tl.minimum(last, highest)
        count = tl.full((), 0, tl.int32)
        before = tl.full((), 0.0, tl.float64)
        for start in range(0, vocab_size, BLOCK):
            inside = start + column < vocab_size
            value = tl.load(base + start + column, mask=inside, other=float("-inf"))
            above = (key_of(value) > last) & inside
            count += tl.sum(above.to(tl.int32), axis=0)
            if MASS:
                share = tl.div_rn(tl.exp(value - top), total).to(tl.float64)
                before += tl.sum(tl.where(above, share, 0.0), axis=0)
        equal_seen = tl.full((), 0, tl.int32)
        for start in range(0, vocab_size, BLOCK):
            inside = start + column < vocab_size
            value = tl.load(base + start + column, mask=inside, other=float("-inf"))
            key = key_of(value)
            equal = (key == last) & inside
            rank = equal_seen + tl.cumsum(equal.to(tl.int32), axis=0) - 1
            if MASS:
                share = tl.div_rn(tl.exp(value - top), total).to(tl.float64)
                stays = ((before + rank.to(tl.float64) * share).to(tl.float32) < bound) | ((count == 0) & (rank == 0))
            else:
                stays = count + rank < bound
            removed = (key < last) | (equal & (stays == 0))
            tl.store(base + start + column, float("-inf"), mask=inside & removed)
            equal_seen += tl.sum(equal.to(tl.int32), axis=0)
