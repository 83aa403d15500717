"""Kernels whose tiles and whose order of adding are the same for every number of rows.

For any device that Triton compiles for. Tried in Triton's interpreter only: not run on hardware.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gemm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    rows,
    columns,
    x_stride,
    INNER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``y = x @ weight.T (+ bias)``: one program a tile, the whole of K in order, float32 sums."""
    tiles_n = tl.cdiv(columns, BLOCK_N)
    tile = tl.program_id(0)
    m = (tile // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, INNER, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < INNER
        x = tl.load(
            x_ptr + m[:, None].to(tl.int64) * x_stride + k[None, :],
            mask=(m < rows)[:, None] & inside[None, :],
            other=0.0,
        )
        w = tl.load(
            weight_ptr + n[None, :].to(tl.int64) * INNER + k[:, None],
            mask=(n < columns)[None, :] & inside[:, None],
            other=0.0,
        )
        total = tl.dot(x, w, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    where = m[:, None].to(tl.int64) * columns + n[None, :]
    tl.store(y_ptr + where, total, mask=(m < rows)[:, None] & (n < columns)[None, :])


@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, y_ptr, hidden, eps, BLOCK: tl.constexpr):
    """``w * x / sqrt(mean(x^2) + eps)``: one program a row, the whole row at once."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < hidden
    x = tl.load(x_ptr + row * hidden + channel, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / hidden + eps)
    tl.store(y_ptr + row * hidden + channel, x * scale * weight, mask=inside)


@triton.jit
def log_softmax_kernel(x_ptr, y_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row, its blocks in order."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(x_ptr + row + column, mask=column < WIDTH, other=float("-inf")))
    peak = tl.max(best, axis=0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total += tl.exp(tl.load(x_ptr + row + column, mask=column < WIDTH, other=float("-inf")) - peak)
    shift = peak + tl.log(tl.sum(total, axis=0))
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + column, mask=column < WIDTH, other=0.0)
        tl.store(y_ptr + row + column, x - shift, mask=column < WIDTH)


@triton.jit
def combine_kernel(pairs_ptr, places_ptr, y_ptr, hidden, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Each token's rows added in order of expert id, float32: one program a token and block of channels."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for number in range(TOP_K):
        place = tl.load(places_ptr + token * TOP_K + number)
        total += tl.load(pairs_ptr + place * hidden + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * hidden + channel, total, mask=inside)
