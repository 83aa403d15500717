"""The kernel of ``attention.paged`` for few rows of a request over a context that may be cut into chunks.

A program takes one entry of a list (:mod:`.work_list`) and one key head: a *tile*, some neighbouring rows of one
request with the query heads that share the key head, and a chunk of its context. The blocks of the next tokens are
looked up while the keys before them are on their way. Who writes the last result of a tile puts them together, or a
launch of its own does.

Floor: bytes, 2·KV·D elements for each token of context, read once for all heads that share them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_tile import LOG2E, attend_places, attend_turned, in_half
from .chunk_results import finish, put_together
from .dependent import let_next_in, wait_turn


@triton.jit
def looked_up(blocks, n, last_block, PIECES: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The PIECES blocks from token n on."""
    number = n // BLOCK_SIZE
    found = (tl.load(blocks + tl.minimum(number, last_block)),)
    for piece in tl.static_range(1, PIECES):  # Triton knows no other way to lengthen a tuple
        found = found + (tl.load(blocks + tl.minimum(number + piece, last_block)),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def places_of(
    found, blocks, n, last_block, PIECES: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    """Where the tokens from n on lie, in elements: their blocks were looked up before, or (no PIECES) are now.

    Of whole blocks a token's place in its own does not depend on n, so that addresses are a few sums with constants.
    """
    beside = tl.arange(0, BLOCK_N)
    if PIECES == 0:
        block = tl.load(blocks + tl.minimum((n + beside) // BLOCK_SIZE, last_block)).to(tl.int64)
        return block * (BLOCK_SIZE * STRIDE) + (n + beside) % BLOCK_SIZE * STRIDE
    elif PIECES == 1:
        return found[0].to(tl.int64) * (BLOCK_SIZE * STRIDE) + (n + beside) % BLOCK_SIZE * STRIDE
    else:
        begin = tl.zeros((BLOCK_N,), tl.int64) + found[0].to(tl.int64) * (BLOCK_SIZE * STRIDE)
        for piece in tl.static_range(1, PIECES):
            begin = tl.where(beside // BLOCK_SIZE == piece, found[piece].to(tl.int64) * (BLOCK_SIZE * STRIDE), begin)
        return begin + beside % BLOCK_SIZE * STRIDE


@triton.jit
def begins_of(
    found, blocks, n, high, kv_head, PIECES: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Where the blocks of the tokens from n on begin, for one key head, and where the tokens lie in them; for those
    at ``high`` and beyond, places of tokens before it."""
    beside = tl.arange(0, BLOCK_N)
    if PIECES == 0:
        token = tl.minimum(n + beside, high - 1)
        block = tl.load(blocks + token // BLOCK_SIZE).to(tl.int64)
        return block * (BLOCK_SIZE * STRIDE) + kv_head * HEAD_DIM, token % BLOCK_SIZE * STRIDE
    else:
        last = (high - 1) // BLOCK_SIZE
        most = (high - 1) % BLOCK_SIZE * STRIDE
        number = n // BLOCK_SIZE
        begin = tl.zeros((BLOCK_N,), tl.int64) + (found[0].to(tl.int64) * (BLOCK_SIZE * STRIDE) + kv_head * HEAD_DIM)
        limit = tl.zeros((BLOCK_N,), tl.int32) + tl.where(number < last, BLOCK_SIZE * STRIDE, most)
        for piece in tl.static_range(1, PIECES):
            place = found[piece].to(tl.int64) * (BLOCK_SIZE * STRIDE) + kv_head * HEAD_DIM
            begin = tl.where(beside // BLOCK_SIZE == piece, place, begin)
            limit = tl.where(
                beside // BLOCK_SIZE == piece, tl.where(number + piece < last, BLOCK_SIZE * STRIDE, most), limit
            )
        if PIECES == 1:
            return begin, tl.minimum((n % BLOCK_SIZE + beside) * STRIDE, limit)
        return begin, tl.minimum(beside % BLOCK_SIZE * STRIDE, limit)


@triton.jit(do_not_specialize=["table_stride"])
def decode_kernel(
    query,
    key_cache,
    value_cache,
    out,
    partial,
    partial_lse,
    arrived,
    sinks,
    table,
    entries,
    length,
    query_stride_t,
    query_stride_h,
    table_stride,
    scale,
    softcap,
    FIELDS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PIECES: tl.constexpr,
    MERGE: tl.constexpr,
    MERGED_ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    TURNED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (entries * KV_HEADS), neighbours the heads of one entry; past the list's end nothing is done. TOKENS rows a
    tile at most, TOKENS * group at most BLOCK_M.

    Results of tiles of one chunk are written to ``out``; others to ``partial [results, KV_HEADS, TOKENS * group,
    HEAD_DIM]`` float32 and its logarithms of sums, base 2. Under MERGE the program that writes the last of them puts
    them together; ``arrived [results, KV_HEADS]`` int32 holds zeros, before and afterwards. PIECES: blocks that hold
    BLOCK_N tokens, or 0 where the two do not fit. TURNED: by :func:`.attention_tile.attend_turned`.
    """
    let_next_in(DEPENDENT)
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    MEMBERS: tl.constexpr = TOKENS * GROUP
    STRIDE: tl.constexpr = KV_HEADS * HEAD_DIM
    kv_head = tl.program_id(0) % KV_HEADS
    place_in_list = tl.program_id(0) // KV_HEADS
    entry = entries + place_in_list * FIELDS
    many = tl.load(length, cache_modifier=".cg")
    request = tl.load(entry, cache_modifier=".cg")
    first = tl.load(entry + 1, cache_modifier=".cg")
    rows = tl.load(entry + 2, cache_modifier=".cg")
    start = tl.load(entry + 3, cache_modifier=".cg")
    low = tl.load(entry + 4, cache_modifier=".cg")
    high = tl.load(entry + 5, cache_modifier=".cg")
    result = tl.load(entry + 6, cache_modifier=".cg")
    first_result = tl.load(entry + 7, cache_modifier=".cg")
    chunks = tl.load(entry + 8, cache_modifier=".cg")
    if place_in_list < many:
        blocks = table + request.to(tl.int64) * table_stride
        last_block = (high - 1) // BLOCK_SIZE
        found = looked_up(blocks, low, last_block, PIECES, BLOCK_SIZE)
        wait_turn(DEPENDENT)  # lengths and block tables were there before the step began, the list soon after
        member = tl.arange(0, BLOCK_M)
        token_row = member // GROUP
        head = kv_head * GROUP + member % GROUP
        channel = tl.arange(0, HEAD_DIM)
        live = token_row < rows
        row = (first + token_row).to(tl.int64)
        source = query + (row * query_stride_t + head * query_stride_h)[:, None] + channel[None, :]
        queries = tl.load(source, mask=live[:, None], other=0.0)
        factor = scale
        if TURNED:
            turned = tl.trans(queries)
        if key_cache.dtype.element_ty == tl.float8e4nv and query.dtype.element_ty == tl.bfloat16:
            queries, by_row = in_half(queries)
            factor = scale * by_row
        position = start + token_row
        if TURNED:
            acc = tl.zeros((HEAD_DIM, BLOCK_M), tl.float32)
        else:
            acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        if TURNED:
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        else:
            total = tl.zeros((BLOCK_M,), tl.float32)
        for n in range(low, high, BLOCK_N):
            token = n + tl.arange(0, BLOCK_N)
            beside = tl.arange(0, BLOCK_N)
            real = beside < high - n  # not token < high: a sum less for each token that a thread reads
            if WINDOW > 0:
                real = real & (beside > start - WINDOW - n)
            if TURNED:
                begin, inside = begins_of(
                    found, blocks, n, high, kv_head, PIECES, BLOCK_SIZE, BLOCK_N, STRIDE, HEAD_DIM
                )
                found = looked_up(blocks, n + BLOCK_N, last_block, PIECES, BLOCK_SIZE)
                acc, top, total = attend_turned(
                    acc, top, total, turned, position, key_cache + begin, value_cache + begin, inside, token, real,
                    factor, softcap, HEAD_DIM, WINDOW, SOFTCAP, TOKENS == 1, PRECISION,
                )  # fmt: skip
            else:
                place = places_of(found, blocks, n, last_block, PIECES, BLOCK_SIZE, BLOCK_N, STRIDE)
                place += kv_head * HEAD_DIM
                found = looked_up(blocks, n + BLOCK_N, last_block, PIECES, BLOCK_SIZE)
                acc, top, total = attend_places(
                    acc, top, total, queries, position, key_cache, value_cache, place[:, None] + channel[None, :],
                    token, real, factor, softcap, HEAD_DIM, BLOCK_N, WINDOW, SOFTCAP, True, TOKENS == 1, False,
                    PRECISION,
                )  # fmt: skip
        if TURNED:
            acc = tl.trans(acc)
            total = tl.sum(total, axis=0)
            if not SOFTCAP:
                top = top * (factor * LOG2E)
        if chunks == 1:
            finish(acc, top, total, out, sinks, row, head, live, Q_HEADS, HEAD_DIM, SINKS)
        else:
            safe = tl.where(total > 0.0, total, 1.0)
            lse = tl.where(total > 0.0, top + tl.log2(safe), float("-inf"))
            part = (result * KV_HEADS + kv_head).to(tl.int64) * MEMBERS + member
            tl.store(partial + part[:, None] * HEAD_DIM + channel[None, :], acc / safe[:, None], mask=live[:, None])
            tl.store(partial_lse + part, lse, mask=live)
            if MERGE:
                counter = arrived + first_result * KV_HEADS + kv_head
                tl.debug_barrier()  # every thread's part is written before one thread says so
                if tl.atomic_add(counter, 1, sem="acq_rel") == chunks - 1:
                    which = tl.arange(0, MERGED_ROWS)
                    mine = (which < MEMBERS) & (which // GROUP < rows)
                    merged, highest, sums = put_together(
                        partial, partial_lse, first_result, chunks, kv_head, mine, KV_HEADS, MEMBERS, MERGED_ROWS,
                        HEAD_DIM, max(1, 32 // MERGED_ROWS),
                    )  # fmt: skip
                    finish(
                        merged, highest, sums, out, sinks, (first + which // GROUP).to(tl.int64),
                        kv_head * GROUP + which % GROUP, mine, Q_HEADS, HEAD_DIM, SINKS,
                    )  # fmt: skip
                    tl.store(counter, 0)
