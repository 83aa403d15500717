"""Online softmax over one tile of cached tokens: what every kernel of ``attention.paged`` does in its loop.

Milakov and Gimelshein 2018, arXiv:1805.02867; in float32, by powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)
"""The interpreter knows no assembly."""


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
def attend_places(
    acc, top, total, queries, position, key_cache, value_cache, place, token, real, scale, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
    ALIKE: tl.constexpr, SUM_BY_UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over BLOCK_N cached tokens that lie at ``place [BLOCK_N, HEAD_DIM]``. MASKED: those not ``real``
    are not read, and rows see none past their own position, or before their window; ALIKE: they see all that are."""
    FEW: tl.constexpr = queries.shape[0] <= 32
    factor = scale * LOG2E
    if SOFTCAP:
        factor = 1.0
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
        if ALIKE:
            seen = real[None, :]
        else:
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
def attend_turned(
    acc, top, total, queries, position, keys_at, values_at, inside, token, real, scale, softcap,
    HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIKE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """:func:`attend_places` turned over: tokens and channels are the matrix unit's rows, members its columns.

    ``queries [HEAD_DIM, M]``, ``acc [HEAD_DIM, M]``, ``position`` and ``top [M]``, of scores before the scale, which is
    more than zero. The unit takes 8 columns but 16 rows: of four heads half the work is for nothing instead of three
    quarters, and half the weights. ``keys_at``, ``values_at [BLOCK_N]``: pointers to where a token's block begins,
    ``inside [BLOCK_N]`` int32: where it lies there; without a window all of them are tokens of the context, so that
    nothing has to be masked. ``total [BLOCK_N, M]`` is summed over tokens by the caller, in the end."""
    factor = scale * LOG2E
    if SOFTCAP:
        factor = 1.0
    channel = tl.arange(0, HEAD_DIM)
    keys = tl.load(keys_at[:, None] + (inside[:, None] + channel[None, :]))
    scores = tl.dot(keys, queries, input_precision=PRECISION)
    if SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores * scale / softcap) - 1.0) * LOG2E
    if ALIKE:
        seen = real[:, None]
    else:
        seen = token[:, None] <= position[None, :]
        if WINDOW > 0:
            seen = seen & (token[:, None] > position[None, :] - WINDOW)
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=0))
    base = tl.where(higher == float("-inf"), 0.0, higher) * factor
    weights = tl.exp2(tl.fma(scores, factor, -base[None, :]))
    shrink = tl.exp2(tl.fma(top, factor, -base))
    total = tl.fma(total, shrink[None, :] + tl.zeros_like(total), weights)
    # Read turned over: turned afterwards they would not come by asynchronous copies.
    values_at = values_at[None, :] + (inside[None, :] + channel[:, None])
    if WINDOW > 0:
        values = tl.load(values_at, mask=real[None, :], other=0.0)
    else:
        values = tl.load(values_at)
    acc = tl.dot(values, weights.to(values.dtype), acc * shrink[None, :], input_precision=PRECISION)
    return acc, higher, total


@triton.jit
def attend_block(
    acc, top, total, queries, position, key_cache, value_cache, table, n, lowest, end, scale, softcap, kv_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, SUM_BY_UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over the cached tokens ``n..n + BLOCK_N``, each looked up in the block table."""
    token = n + tl.arange(0, BLOCK_N)
    real = (token >= lowest) & (token < end)
    if MASKED:
        block = tl.load(table + token // BLOCK_SIZE, mask=real, other=0)
    else:
        block = tl.load(table + token // BLOCK_SIZE)
    cached = (block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
    place = cached[:, None] + tl.arange(0, HEAD_DIM)[None, :]
    return attend_places(
        acc, top, total, queries, position, key_cache, value_cache, place, token, real, scale, softcap,
        HEAD_DIM, BLOCK_N, WINDOW, SOFTCAP, MASKED, False, SUM_BY_UNIT, PRECISION,
    )  # fmt: skip
