"""The kernel of ``attention.paged`` for prompts: a program takes a tile and its whole context.

A *tile* is some neighbouring rows of one request with the query heads that share a key head. Keys and values are read
where they lie, BLOCK_N tokens at a time, through the block table.

Few rows over a long context: :mod:`.decode_kernel`. Rows whose bits do not depend on their tile:
:mod:`.fixed_attention`.

Floor: operations, 2·H·D multiply-adds for each pair of positions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_tile import attend_block, in_half
from .chunk_results import finish
from .dependent import let_next_in, wait_turn


@triton.jit
def tile_of(tiles, positions, tile, IDENTITY: tl.constexpr):
    """Request, first row, number of rows, first and last position of a tile ``[3]`` int32."""
    if IDENTITY:
        request = tile
        first = tile
        count = 1
    else:
        request = tl.load(tiles + 3 * tile)
        first = tl.load(tiles + 3 * tile + 1)
        count = tl.load(tiles + 3 * tile + 2)
    start = tl.load(positions + first).to(tl.int32)
    last = tl.load(positions + first + count - 1).to(tl.int32)
    return request, first, count, start, last


@triton.jit
def attend(
    acc, top, total, queries, position, key_cache, value_cache, table, low, high, lowest, end, scale, softcap, kv_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, SUM_BY_UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over the cached tokens ``low..high``, a multiple of BLOCK_N apart."""
    for n in range(low, high, BLOCK_N):
        acc, top, total = attend_block(
            acc, top, total, queries, position, key_cache, value_cache, table, n, lowest, end, scale, softcap, kv_head,
            KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_SIZE, WINDOW, SOFTCAP, MASKED, SUM_BY_UNIT, PRECISION,
        )  # fmt: skip
    return acc, top, total


@triton.jit(do_not_specialize=["table_stride"])
def attention_kernel(
    query,
    key_cache,
    value_cache,
    out,
    sinks,
    table,
    positions,
    tiles,
    query_stride_t,
    query_stride_h,
    table_stride,
    scale,
    softcap,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (tiles, kv_heads); rows of a tile times group are at most BLOCK_M."""
    let_next_in(DEPENDENT)
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    request, first, count, start, last = tile_of(tiles, positions, tile, False)
    wait_turn(DEPENDENT)
    member = tl.arange(0, BLOCK_M)
    token = member // GROUP
    head = kv_head * GROUP + member % GROUP
    live = token < count
    position = start + token
    row = (first + token).to(tl.int64)
    source = query + (row * query_stride_t + head * query_stride_h)[:, None] + tl.arange(0, HEAD_DIM)[None, :]
    queries = tl.load(source, mask=live[:, None], other=0.0)
    factor = scale
    if key_cache.dtype.element_ty == tl.float8e4nv and query.dtype.element_ty == tl.bfloat16:
        queries, by_row = in_half(queries)
        factor = scale * by_row
    end = last + 1
    lowest = 0
    low = 0
    if WINDOW > 0:
        lowest = start - WINDOW + 1
        low = tl.maximum(lowest, 0) // BLOCK_N * BLOCK_N
    blocks = table + request.to(tl.int64) * table_stride
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if WINDOW == 0:
        # Tokens that every row of the tile sees need no mask.
        whole = tl.minimum(end, (start + 1) // BLOCK_N * BLOCK_N)
        acc, top, total = attend(
            acc, top, total, queries, position, key_cache, value_cache, blocks, low, whole, lowest, end, factor,
            softcap, kv_head, KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_SIZE, WINDOW, SOFTCAP, False, False, PRECISION,
        )  # fmt: skip
        low = whole
    acc, top, total = attend(
        acc, top, total, queries, position, key_cache, value_cache, blocks, low, end, lowest, end, factor,
        softcap, kv_head, KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_SIZE, WINDOW, SOFTCAP, True, False, PRECISION,
    )  # fmt: skip
    finish(acc, top, total, out, sinks, row, head, live, Q_HEADS, HEAD_DIM, SINKS)
