"""The kernels of ``attention.paged``: one for all rows, one to put split contexts together.

A program takes a *tile*, some neighbouring rows of one request with the query heads that share a key head, and a
*chunk* of the context that they see. Keys and values are read where they lie, BLOCK_N tokens at a time, through the
block table; softmax is online (Milakov and Gimelshein 2018, arXiv:1805.02867), in float32, by powers of two.

Rows whose bits do not depend on their tile: :mod:`.fixed_attention`.

Floor of decode: bytes, 2·KV·D elements for each token of context, read once for all heads that share them. Floor of
a prompt: operations, 2·H·D multiply-adds for each pair of positions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import let_next_in, wait_turn

LOG2E = tl.constexpr(1.4426950408889634)
ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)
"""The interpreter knows no assembly."""


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
def chunks_of(start, last, chunk, splits, FIXED: tl.constexpr, WINDOW: tl.constexpr, N: tl.constexpr):
    """First position read, tokens a chunk, and number of chunks. FIXED: chunks begin at multiples of ``chunk``."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(start - WINDOW + 1, 0)
    size = chunk
    if FIXED:
        begin = begin // chunk * chunk
    else:
        begin = begin // N * N
        size = tl.maximum(chunk, tl.cdiv(tl.cdiv(last + 1 - begin, splits), N) * N)
    return begin, size, tl.cdiv(last + 1 - begin, size)


@triton.jit
def widened(values, dtype: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ASSEMBLED: tl.constexpr):
    """Exact. Of FP8 by neighbours: as single bytes they would be read out of shared memory across its rows.

    Four numbers become float16 by two instructions. These are not said to be pure, so that they stay before the way to
    the matrix unit, whose order of numbers has single bytes too.
    """
    if values.dtype == dtype:
        return values
    elif ASSEMBLED and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r",
            [values],
            dtype=tl.float16,
            is_pure=False,
            pack=4,
        )
    else:
        even, odd = tl.split(tl.reshape(values, (ROWS, WIDTH // 2, 2)))
        return tl.interleave(even.to(dtype), odd.to(dtype))


@triton.jit
def in_half(queries):
    """Rows of bfloat16 as float16 times a power of two: FP8 becomes float16 in one step, bfloat16 in three."""
    wide = queries.to(tl.float32)
    exponent = tl.max(tl.abs(wide), axis=1).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(exponent, 253)  # of infinity: its row stays that
    factor = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return (wide * inverse[:, None]).to(tl.float16), factor[:, None]


@triton.jit
def attend_block(
    acc,
    top,
    total,
    queries,
    position,
    key_cache,
    value_cache,
    table,
    n,
    lowest,
    end,
    scale,
    softcap,
    kv_head,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    SUM_BY_UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax over the cached tokens ``n..n + BLOCK_N``."""
    FEW: tl.constexpr = queries.shape[0] <= 32
    channel = tl.arange(0, HEAD_DIM)
    factor = scale * LOG2E
    if SOFTCAP:
        factor = 1.0
    token = n + tl.arange(0, BLOCK_N)
    if MASKED:
        real = (token >= lowest) & (token < end)
        block = tl.load(table + token // BLOCK_SIZE, mask=real, other=0)
    else:
        block = tl.load(table + token // BLOCK_SIZE)
    cached = (block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
    place = cached[:, None] + channel[None, :]
    if MASKED:
        keys = tl.load(key_cache + place, mask=real[:, None], other=0.0)
    else:
        keys = tl.load(key_cache + place)
    keys = keys.to(queries.dtype)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    if SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores * scale / softcap) - 1.0) * LOG2E
    scaled = scores * factor
    if MASKED:
        seen = token[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (token[None, :] > position[:, None] - WINDOW)
        scaled = tl.where(seen, scaled, float("-inf"))
    higher = tl.maximum(top, tl.max(scaled, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(tl.fma(scores, factor, -base[:, None]))
    if MASKED:
        weights = tl.where(seen, weights, 0.0)
    shrink = tl.exp2(top - base)
    if SUM_BY_UNIT:
        ones = tl.full((BLOCK_N, 16), 1.0, queries.dtype)
        sums = tl.max(tl.dot(weights.to(queries.dtype), ones, input_precision=PRECISION), axis=1)
    else:
        sums = tl.sum(weights, axis=1)
    total = tl.fma(total, shrink, sums)
    if MASKED:
        values = tl.load(value_cache + place, mask=real[:, None], other=0.0)
    else:
        values = tl.load(value_cache + place)
    values = widened(values, queries.dtype, BLOCK_N, HEAD_DIM, ASSEMBLY and FEW)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
    return acc, higher, total


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
def combined(partial, partial_lse, base, chunks, HEAD_DIM: tl.constexpr, FIXED: tl.constexpr, TOGETHER: tl.constexpr):
    """Chunks ``base..base + chunks`` of one row and head: values ``[HEAD_DIM]``, largest logarithm, sum of weights."""
    channel = tl.arange(0, HEAD_DIM)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    acc = tl.zeros((HEAD_DIM,), tl.float32)
    for number in range(0, chunks, TOGETHER):
        if FIXED:
            for beside in tl.static_range(TOGETHER):  # read ahead, put together one by one
                real = number + beside < chunks
                lse = tl.load(
                    partial_lse + base + number + beside, mask=real, other=float("-inf"), cache_modifier=".cg"
                )
                place = partial + (base + number + beside) * HEAD_DIM + channel
                values = tl.load(place, mask=real & (channel >= 0), other=0.0, cache_modifier=".cg")
                acc, top, total = joined(acc, top, total, values, lse, False)
        else:
            part = number + tl.arange(0, TOGETHER)
            real = part < chunks
            lse = tl.load(partial_lse + base + part, mask=real, other=float("-inf"), cache_modifier=".cg")
            place = partial + (base + part)[:, None] * HEAD_DIM + channel[None, :]
            values = tl.load(place, mask=real[:, None], other=0.0, cache_modifier=".cg")
            higher = tl.maximum(top, tl.max(lse, axis=0))
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(lse - safe)
            shrink = tl.exp2(top - safe)
            total = total * shrink + tl.sum(weights, axis=0)
            acc = acc * shrink + tl.sum(weights[:, None] * values, axis=0)
            top = higher
    return acc, top, total


@triton.jit
def write_row(
    acc, top, total, out, sinks, row, head, Q_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SINKS: tl.constexpr
):
    """The same as :func:`finish` for one row and head."""
    if SINKS:
        sink = tl.load(sinks + head) * LOG2E
        higher = tl.maximum(top, sink)
        shrink = tl.exp2(top - higher)
        acc = acc * shrink
        total = tl.fma(total, shrink, tl.exp2(sink - higher))
    target = out + (row * Q_HEADS + head) * HEAD_DIM + tl.arange(0, HEAD_DIM)
    tl.store(target, (acc / tl.where(total > 0.0, total, 1.0)).to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["most_chunks", "splits", "chunk", "table_stride"])
def attention_kernel(
    query,
    key_cache,
    value_cache,
    out,
    partial,
    partial_lse,
    arrived,
    sinks,
    table,
    positions,
    tiles,
    query_stride_t,
    query_stride_h,
    table_stride,
    scale,
    softcap,
    chunk,
    most_chunks,
    splits,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    MERGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    IDENTITY: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (tiles, kv_heads, splits). TOKENS rows a tile at most, TOKENS * group <= BLOCK_M.

    The result is written, or under SPLIT ``partial [tiles, kv_heads, TOKENS * group,
    most_chunks, HEAD_DIM]`` float32 and its logarithms of sums, base 2. Under MERGE, for tiles of one row, the program
    of a tile and key head that arrives last puts the chunks together; ``arrived [tiles, kv_heads]`` int32 holds zeros,
    before and afterwards.
    """
    let_next_in(DEPENDENT)
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    request, first, count, start, last = tile_of(tiles, positions, tile, IDENTITY)
    begin, size, chunks = chunks_of(start, last, chunk, splits, False, WINDOW, BLOCK_N)
    wait_turn(DEPENDENT)
    member = tl.arange(0, BLOCK_M)
    token = member // GROUP
    head = kv_head * GROUP + member % GROUP
    live = token < count
    channel = tl.arange(0, HEAD_DIM)
    position = start + token
    row = (first + token).to(tl.int64)
    source = query + (row * query_stride_t + head * query_stride_h)[:, None] + channel[None, :]
    queries = tl.load(source, mask=live[:, None], other=0.0)
    factor = scale
    if key_cache.dtype.element_ty == tl.float8e4nv and query.dtype.element_ty == tl.bfloat16:
        queries, by_row = in_half(queries)
        factor = scale * by_row
    end = last + 1
    lowest = 0
    if WINDOW > 0:
        lowest = start - WINDOW + 1
    blocks = table + request.to(tl.int64) * table_stride
    for number in range(tl.program_id(2), chunks, splits):
        low = begin + number * size
        high = tl.minimum(low + size, end)
        acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        if WINDOW == 0:
            # Tokens that every row of the tile sees need no mask.
            whole = tl.maximum(low, tl.minimum(high, (start + 1) // BLOCK_N * BLOCK_N))
            acc, top, total = attend(
                acc, top, total, queries, position, key_cache, value_cache, blocks, low, whole, lowest, end, factor,
                softcap, kv_head, KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_SIZE, WINDOW, SOFTCAP, False, False,
                PRECISION,
            )  # fmt: skip
            low = whole
        acc, top, total = attend(
            acc, top, total, queries, position, key_cache, value_cache, blocks, low, high, lowest, end, factor,
            softcap, kv_head, KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_SIZE, WINDOW, SOFTCAP, True, False,
                PRECISION,
        )  # fmt: skip
        if SPLIT:
            safe = tl.where(total > 0.0, total, 1.0)
            part = acc / safe[:, None]
            lse = tl.where(total > 0.0, top + tl.log2(safe), float("-inf"))
            member_row = (tile.to(tl.int64) * KV_HEADS + kv_head) * (TOKENS * GROUP) + member
            place = member_row * most_chunks + number
            tl.store(partial + place[:, None] * HEAD_DIM + channel[None, :], part, mask=live[:, None])
            tl.store(partial_lse + place, lse, mask=live)
        else:
            finish(acc, top, total, out, sinks, row, head, live, Q_HEADS, HEAD_DIM, SINKS)
    if MERGE:
        counter = arrived + tile * KV_HEADS + kv_head
        tl.debug_barrier()  # every thread's part is written before one thread says so
        if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
            for which in tl.static_range(GROUP):
                base = ((tile.to(tl.int64) * KV_HEADS + kv_head) * GROUP + which) * most_chunks
                merged, highest, sums = combined(partial, partial_lse, base, chunks, HEAD_DIM, False, 8)
                write_row(
                    merged, highest, sums, out, sinks, first.to(tl.int64), kv_head * GROUP + which,
                    Q_HEADS, HEAD_DIM, SINKS,
                )  # fmt: skip
            tl.store(counter, 0)


@triton.jit(do_not_specialize=["most_chunks", "splits", "chunk"])
def combine_kernel(
    partial,
    partial_lse,
    out,
    sinks,
    positions,
    tiles,
    chunk,
    most_chunks,
    splits,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    FIXED: tl.constexpr,
    IDENTITY: tl.constexpr,
    TOGETHER: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (tiles, kv_heads * TOKENS * group): the chunks of one row and head, in order, TOGETHER at a time."""
    let_next_in(DEPENDENT)
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    tile = tl.program_id(0)
    kv_head = tl.program_id(1) // (TOKENS * GROUP)
    member = tl.program_id(1) % (TOKENS * GROUP)
    request, first, count, start, last = tile_of(tiles, positions, tile, IDENTITY)
    wait_turn(DEPENDENT)
    token = member // GROUP
    if token < count:
        begin, size, chunks = chunks_of(start, last, chunk, splits, FIXED, WINDOW, BLOCK_N)
        head = kv_head * GROUP + member % GROUP
        base = ((tile.to(tl.int64) * KV_HEADS + kv_head) * (TOKENS * GROUP) + member) * most_chunks
        acc, top, total = combined(partial, partial_lse, base, chunks, HEAD_DIM, FIXED, TOGETHER)
        write_row(acc, top, total, out, sinks, (first + token).to(tl.int64), head, Q_HEADS, HEAD_DIM, SINKS)
