"""Results of chunks of a context: putting them together, and writing a tile's rows.

A chunk's result is its values over its sum of weights, and that sum's logarithm, base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_tile import LOG2E
from .dependent import let_next_in, wait_turn


@triton.jit
def joined(acc, top, total, part, lse, COLUMNS: tl.constexpr):
    """Running result, its largest logarithm and sum of weights, with one more chunk: ``part``, normalised, and lse."""
    higher = tl.maximum(top, lse)
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(lse - safe)
    shrink = tl.exp2(top - safe)
    total = tl.fma(total, shrink, weight)
    if COLUMNS:
        acc = tl.fma(part, weight[:, None] + tl.zeros_like(part), acc * shrink[:, None])
    else:
        acc = tl.fma(part, weight + tl.zeros_like(part), acc * shrink)
    return acc, higher, total


@triton.jit
def finish(
    acc, top, total, out, sinks, row, head, live, Q_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SINKS: tl.constexpr
):
    """Divide by the sum of weights, a sink's among them, and write the rows of a tile."""
    if SINKS:
        sink = tl.load(sinks + head) * LOG2E
        higher = tl.maximum(top, sink)
        shrink = tl.exp2(top - higher)
        acc = acc * shrink[:, None]
        total = tl.fma(total, shrink, tl.exp2(sink - higher))
    result = (acc / tl.where(total > 0.0, total, 1.0)[:, None]).to(out.dtype.element_ty)
    target = out + ((row * Q_HEADS + head) * HEAD_DIM)[:, None] + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(target, result, mask=live[:, None])


@triton.jit
def put_together(
    partial, partial_lse, first, chunks, kv_head, live, KV_HEADS: tl.constexpr, MEMBERS: tl.constexpr,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Results ``first..first + chunks`` of ROWS members of a tile: values ``[ROWS, HEAD_DIM]``, largest logarithm and
    sum of weights ``[ROWS]``. TOGETHER are read at once. ``partial [results, KV_HEADS, MEMBERS, HEAD_DIM]`` float32."""
    acc = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for number in range(0, chunks, TOGETHER):
        part = number + tl.arange(0, TOGETHER)
        member = ((first + part) * KV_HEADS + kv_head).to(tl.int64)[:, None] * MEMBERS + tl.arange(0, ROWS)[None, :]
        real = (part < chunks)[:, None] & live[None, :]
        lse = tl.load(partial_lse + member, mask=real, other=float("-inf"), cache_modifier=".cg")
        place = partial + member[:, :, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, None, :]
        values = tl.load(place, mask=real[:, :, None], other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, tl.max(lse, axis=0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(lse - safe[None, :])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(weights, axis=0)
        acc = acc * shrink[:, None] + tl.sum(weights[:, :, None] * values, axis=0)
        top = higher
    return acc, top, total


@triton.jit
def merge_kernel(
    partial,
    partial_lse,
    out,
    sinks,
    tiles,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    SINKS: tl.constexpr,
    TOGETHER: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (tiles, KV_HEADS * TOKENS * group): one row and head. ``tiles [n, 4]`` int32: first row, rows, first result,
    results. A tile of one chunk is written already."""
    let_next_in(DEPENDENT)
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    MEMBERS: tl.constexpr = TOKENS * GROUP
    kv_head = tl.program_id(1) // MEMBERS
    member = tl.program_id(1) % MEMBERS
    tile = tiles + tl.program_id(0) * 4
    row = tl.load(tile, cache_modifier=".cg") + member // GROUP
    there = member // GROUP < tl.load(tile + 1, cache_modifier=".cg")
    first = tl.load(tile + 2, cache_modifier=".cg")
    chunks = tl.load(tile + 3, cache_modifier=".cg")
    wait_turn(DEPENDENT)  # the list was there long before
    if there & (chunks > 1):
        one = tl.arange(0, 1)
        acc, top, total = put_together(
            partial + member * HEAD_DIM, partial_lse + member, first, chunks, kv_head, one == 0,
            KV_HEADS, MEMBERS, 1, HEAD_DIM, TOGETHER,
        )  # fmt: skip
        finish(
            acc, top, total, out, sinks, (row + one).to(tl.int64), kv_head * GROUP + member % GROUP + one, one == 0,
            Q_HEADS, HEAD_DIM, SINKS,
        )  # fmt: skip
