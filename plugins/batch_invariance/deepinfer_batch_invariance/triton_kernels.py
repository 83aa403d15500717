"""Kernels whose order of adding is the same for every number of rows.

For any device that Triton compiles for; tried in Triton's interpreter and on an H200.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def gemm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    rows,
    columns,
    x_stride,
    INNER: tl.constexpr,
    PARTS: tl.constexpr,
    SPREAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """``y = x @ weight.T (+ bias)``: float32 sums over K in ``PARTS`` stretches, each in order; then the stretches.

    One program a tile. With SPREAD, axis 1 of the grid is the stretch, and ``y [PARTS, rows, columns]`` float32 gets
    what :func:`add_parts_kernel` adds up. Without, the program adds the same numbers in the same order.
    """
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(columns, BLOCK_N)
    tile = tl.program_id(0)
    # Tiles that read the same weights run together.
    first = tile // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    within = tile % (GROUP * tiles_n)
    m = (first + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = within // height * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows past the end read the first one; what they give is not stored.
    x_rows = x_ptr + tl.where(m < rows, m, 0).to(tl.int64)[:, None] * x_stride + k[None, :]
    w_rows = weight_ptr + tl.where(n < columns, n, 0).to(tl.int64)[None, :] * INNER + k[:, None]
    LENGTH: tl.constexpr = (INNER + BLOCK_K * PARTS - 1) // (BLOCK_K * PARTS) * BLOCK_K
    inside = (m < rows)[:, None] & (n < columns)[None, :]
    where = m[:, None].to(tl.int64) * columns + n[None, :]
    if SPREAD:
        part = tl.program_id(1)
        total = _stretch(x_rows, w_rows, k, part * LENGTH, INNER, LENGTH, PARTS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)
        tl.store(y_ptr + part.to(tl.int64) * rows * columns + where, total, mask=inside)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for part in range(PARTS):
            total += _stretch(
                x_rows, w_rows, k, part * LENGTH, INNER, LENGTH, PARTS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K
            )
        if HAS_BIAS:
            total += tl.load(bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
        tl.store(y_ptr + where, total, mask=inside)


@triton.jit
def _stretch(
    x_rows,
    w_rows,
    k,
    start,
    INNER: tl.constexpr,
    LENGTH: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(0, LENGTH, BLOCK_K):
        at = start + step
        if LENGTH * PARTS == INNER:
            x = tl.load(x_rows + at)
            w = tl.load(w_rows + at)
        else:
            x = tl.load(x_rows + at, mask=(at + k < INNER)[None, :], other=0.0)
            w = tl.load(w_rows + at, mask=(at + k < INNER)[:, None], other=0.0)
        total = tl.dot(x, w, total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=["rows"])
def add_parts_kernel(
    parts_ptr, bias_ptr, y_ptr, rows, columns, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """``y = sum_p parts[p] (+ bias)``, in order of p; ``parts [PARTS, rows, columns]`` float32. Axis 0: rows."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(PARTS):
        total += tl.load(parts_ptr + (part * rows + row) * columns + column, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * columns + column, total, mask=inside)


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
