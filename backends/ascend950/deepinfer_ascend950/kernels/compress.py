"""Pooling of a window's tokens into one entry (spec: V4, 2.4): a softmax over tokens for each channel, in one pass.

Vector cores only. A program pools one window and BLOCK channels: it reads ``rate`` rows of values and scores, twice
that with overlap, and keeps four vectors. Rows lie anywhere in the cache; each is read whole, from a scalar address.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pool(
    value,
    score,
    rows,
    gap,
    out,
    RATE: tl.constexpr,
    OVERLAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``out [N, HEAD_DIM]`` float32; ``value``, ``score [cache rows, WIDTH]`` float32; BLOCK divides HEAD_DIM.

    ``rows [N, RATE]`` int64, or ``[N, 2 * RATE]`` with OVERLAP: those of the window before, then its own. WIDTH is
    HEAD_DIM, or with OVERLAP twice that: the window before counts by the first half, the window itself by the second.
    ``gap [N]``: 0, or -inf where there is no window before, whose rows are then any that may be read.
    """
    window = tl.program_id(0)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if OVERLAP:
        own = rows + window * 2 * RATE + RATE
        width = 2 * HEAD_DIM
        half = lane + HEAD_DIM
    else:
        own = rows + window * RATE
        width = HEAD_DIM
        half = lane
    at = tl.load(own) * width
    top = tl.load(score + at + half)
    pooled = tl.load(value + at + half)
    total = tl.full((BLOCK,), 1.0, tl.float32)
    for j in range(1, RATE):
        at = tl.load(own + j) * width
        s = tl.load(score + at + half)
        v = tl.load(value + at + half)
        higher = tl.maximum(top, s)
        kept = tl.exp(top - higher)
        new = tl.exp(s - higher)
        total = total * kept + new
        pooled = pooled * kept + v * new
        top = higher
    if OVERLAP:
        missing = tl.load(gap + window)
        for j in range(RATE):
            at = tl.load(rows + window * 2 * RATE + j) * width
            s = tl.load(score + at + lane) + missing
            v = tl.load(value + at + lane)
            higher = tl.maximum(top, s)
            kept = tl.exp(top - higher)
            new = tl.exp(s - higher)
            total = total * kept + new
            pooled = pooled * kept + v * new
            top = higher
    tl.store(out + window * HEAD_DIM + lane, pooled / total)
