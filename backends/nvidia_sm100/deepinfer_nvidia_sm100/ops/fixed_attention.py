"""The kernel of ``attention.paged`` whose rows have the same bits in any company, for decode rows and prompts alike.

The context is cut at multiples of CHUNK. A chunk's softmax is online from its first token, products and sums that the
compiler could join in more than one way are one operation, and weights are summed by the matrix unit, in the order of
the tokens. Chunks are put together one by one in order: by the program that computed them all, or by the one that
arrives last, or by a launch of their own. So neither the tile nor the number of programs shows in a bit, and what a
row does not see adds exact zeros.

One loop goes over all tokens of a program, whatever chunks they belong to: with a loop for each chunk, loads in flight
would run dry at every end of one.

Floor: as :mod:`.attention_kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_kernel import tile_of
from .attention_tile import LOG2E, attend_block, in_half
from .chunk_results import finish, joined
from .dependent import let_next_in, wait_turn

READ_AHEAD = tl.constexpr(8)


@triton.jit
def normalised(acc, top, total):
    """A chunk's values and the logarithm of its sum, base 2."""
    safe = tl.where(total > 0.0, total, 1.0)
    return acc / safe[:, None], tl.where(total > 0.0, top + tl.log2(safe), float("-inf"))


@triton.jit
def write_part(
    part, lse, partial, partial_lse, number, most_chunks, live, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """A chunk of every row of a tile, whose parts begin at ``partial`` and ``partial_lse``."""
    place = tl.arange(0, BLOCK_M) * most_chunks + number
    tl.store(partial + (place[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]), part, mask=live[:, None])
    tl.store(partial_lse + place, lse, mask=live)


@triton.jit
def together(parts, parts_lse, most_chunks, live, chunks, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr):
    """The chunks of ROWS rows and heads, one by one; READ_AHEAD are read at once."""
    channel = tl.arange(0, HEAD_DIM)
    acc = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for number in range(0, chunks, READ_AHEAD):
        for beside in tl.static_range(READ_AHEAD):
            real = live & (number + beside < chunks)
            place = tl.arange(0, ROWS) * most_chunks + number + beside
            lse = tl.load(parts_lse + place, mask=real, other=float("-inf"), cache_modifier=".cg")
            values = parts + (place[:, None] * HEAD_DIM + channel[None, :])
            part = tl.load(values, mask=real[:, None], other=0.0, cache_modifier=".cg")
            acc, top, total = joined(acc, top, total, part, lse, True)
    return acc, top, total


@triton.jit(do_not_specialize=["table_stride", "most_chunks", "splits"])
def fixed_attention_kernel(
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
    most_chunks,
    splits,
    CHUNK: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    MERGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    IDENTITY: tl.constexpr,
    SUM_BY_UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid and arguments as ``attention_kernel``'s; a program takes neighbouring chunks."""
    let_next_in(DEPENDENT)
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    request, first, count, start, last = tile_of(tiles, positions, tile, IDENTITY)
    end = last + 1
    begin = 0
    lowest = 0
    if WINDOW > 0:
        lowest = start - WINDOW + 1
        begin = tl.maximum(lowest, 0) // CHUNK * CHUNK
    wait_turn(DEPENDENT)
    chunks = tl.cdiv(end - begin, CHUNK)
    each = tl.cdiv(chunks, splits)
    low = begin + tl.program_id(2) * each * CHUNK
    high = tl.minimum(low + each * CHUNK, end)
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
    blocks = table + request.to(tl.int64) * table_stride
    before = (tile.to(tl.int64) * KV_HEADS + kv_head) * (TOKENS * GROUP) * most_chunks
    parts = partial + before * HEAD_DIM
    parts_lse = partial_lse + before
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if not SPLIT:
        whole_acc = acc
        whole_top = top
        whole_total = total
    whole = low
    if WINDOW == 0:
        # Tokens that every row of the tile sees need no mask.
        whole = tl.maximum(low, tl.minimum(high, (start + 1) // BLOCK_N * BLOCK_N))
        for n in range(low, whole, BLOCK_N):
            acc, top, total = attend_block(
                acc, top, total, queries, position, key_cache, value_cache, blocks, n, lowest, end, factor, softcap,
                kv_head, KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_SIZE, WINDOW, SOFTCAP, False, SUM_BY_UNIT, PRECISION,
            )  # fmt: skip
            if ((n + BLOCK_N) % CHUNK == 0) | (n + BLOCK_N >= high):
                part, lse = normalised(acc, top, total)
                if SPLIT:
                    write_part(part, lse, parts, parts_lse, (n - begin) // CHUNK, most_chunks, live, BLOCK_M, HEAD_DIM)
                else:
                    whole_acc, whole_top, whole_total = joined(whole_acc, whole_top, whole_total, part, lse, True)
                acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
                top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
                total = tl.zeros((BLOCK_M,), tl.float32)
    for n in range(whole, high, BLOCK_N):
        acc, top, total = attend_block(
            acc, top, total, queries, position, key_cache, value_cache, blocks, n, lowest, end, factor, softcap,
            kv_head, KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_SIZE, WINDOW, SOFTCAP, True, SUM_BY_UNIT, PRECISION,
        )  # fmt: skip
        if ((n + BLOCK_N) % CHUNK == 0) | (n + BLOCK_N >= high):
            part, lse = normalised(acc, top, total)
            if SPLIT:
                write_part(part, lse, parts, parts_lse, (n - begin) // CHUNK, most_chunks, live, BLOCK_M, HEAD_DIM)
            else:
                whole_acc, whole_top, whole_total = joined(whole_acc, whole_top, whole_total, part, lse, True)
            acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
            top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
    if not SPLIT:
        finish(whole_acc, whole_top, whole_total, out, sinks, row, head, live, Q_HEADS, HEAD_DIM, SINKS)
    if MERGE:
        counter = arrived + tile * KV_HEADS + kv_head
        tl.debug_barrier()  # every thread's part is written before one thread says so
        if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
            which = tl.arange(0, GROUP_BLOCK)
            merged, highest, sums = together(
                parts, parts_lse, most_chunks, which < GROUP, chunks, HEAD_DIM, GROUP_BLOCK
            )
            finish(
                merged, highest, sums, out, sinks, first.to(tl.int64), kv_head * GROUP + which % GROUP, which < GROUP,
                Q_HEADS, HEAD_DIM, SINKS,
            )  # fmt: skip
            tl.store(counter, 0)


@triton.jit
def combined(partial, partial_lse, base, chunks, HEAD_DIM: tl.constexpr):
    """Chunks ``base..base + chunks`` of one row and head: values ``[HEAD_DIM]``, largest logarithm, sum of weights."""
    channel = tl.arange(0, HEAD_DIM)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    acc = tl.zeros((HEAD_DIM,), tl.float32)
    for number in range(0, chunks, READ_AHEAD):
        for beside in tl.static_range(READ_AHEAD):
            real = number + beside < chunks
            lse = tl.load(partial_lse + base + number + beside, mask=real, other=float("-inf"), cache_modifier=".cg")
            place = partial + (base + number + beside) * HEAD_DIM + channel
            values = tl.load(place, mask=real & (channel >= 0), other=0.0, cache_modifier=".cg")
            acc, top, total = joined(acc, top, total, values, lse, False)
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


@triton.jit(do_not_specialize=["most_chunks"])
def combine_kernel(
    partial,
    partial_lse,
    out,
    sinks,
    positions,
    tiles,
    most_chunks,
    CHUNK: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    IDENTITY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (tiles, kv_heads * TOKENS * group): the chunks of one row and head, in order."""
    let_next_in(DEPENDENT)
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    tile = tl.program_id(0)
    kv_head = tl.program_id(1) // (TOKENS * GROUP)
    member = tl.program_id(1) % (TOKENS * GROUP)
    request, first, count, start, last = tile_of(tiles, positions, tile, IDENTITY)
    wait_turn(DEPENDENT)
    token = member // GROUP
    if token < count:
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(start - WINDOW + 1, 0) // CHUNK * CHUNK
        head = kv_head * GROUP + member % GROUP
        base = ((tile.to(tl.int64) * KV_HEADS + kv_head) * (TOKENS * GROUP) + member) * most_chunks
        acc, top, total = combined(partial, partial_lse, base, tl.cdiv(last + 1 - begin, CHUNK), HEAD_DIM)
        write_row(acc, top, total, out, sinks, (first + token).to(tl.int64), head, Q_HEADS, HEAD_DIM, SINKS)
