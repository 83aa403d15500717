"""Products of few rows with FP8 weights: the weight is read once, at one byte an element.

The tile is turned over as in :mod:`.few_rows`. Rows that stay as they are meet weights that are widened in registers,
scale included, which is exact: a power of two times e4m3 fits into bfloat16. Rounded rows (:mod:`.quantise_rows`)
meet them in FP8, and sums over 128 inner elements are scaled outside of the matrix unit.

Floor: bytes of the weight, N·K, for up to about 100 rows (200 where rows are rounded); operations beyond.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .dependent import dependent, take_turn
from .few_rows import Tile, parts_of
from .starting import starter

ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)
"""Whether there is a compiler for it."""


@triton.jit
def _scales(scale, column, step, steps, N, SCALE_ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of a tile's weight rows: one number ``[1]`` where they share it, else ``[BLOCK_N]``."""
    if SCALE_ROWS % BLOCK_N == 0:
        return tl.load(scale + (tl.min(column, axis=0) // SCALE_ROWS * steps + step) + tl.arange(0, 1))
    else:
        return tl.load(scale + column // SCALE_ROWS * steps + step, mask=column < N, other=0.0)


@triton.jit
def _widened(values, dtype: tl.constexpr):
    """Exact. Assembly that is not said to be pure stays before the way to the matrix unit: so FP8 leaves shared memory
    16 bytes at a time, and all products of a step are under way at once."""
    if ASSEMBLY and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 a, b, c, d, e, f; .reg .b32 p, q; .reg .f32 w, x, y, z; mov.b32 {a, b}, $2; "
            "cvt.rn.f16x2.e4m3x2 p, a; cvt.rn.f16x2.e4m3x2 q, b; mov.b32 {c, d}, p; mov.b32 {e, f}, q; "
            "cvt.f32.f16 w, c; cvt.f32.f16 x, d; cvt.f32.f16 y, e; cvt.f32.f16 z, f; "
            "cvt.rn.bf16x2.f32 $0, x, w; cvt.rn.bf16x2.f32 $1, z, y; }",
            "=r,=r,r",
            [values],
            dtype=tl.bfloat16,
            is_pure=False,
            pack=4,
        )
    else:
        return values.to(tl.float32).to(dtype)


@triton.jit(do_not_specialize=["M", "scale_stride", "splits"])
def fp8_few_rows_kernel(
    x,
    x_scale,
    weight,
    scale,
    bias,
    out,
    partial,
    arrived,
    M,
    N,
    K,
    x_stride,
    scale_stride,
    splits,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN_N: tl.constexpr,
    BIAS: tl.constexpr,
    ROUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (ceil(N / BLOCK_N), splits, ceil(M / BLOCK_M)). ``weight [N, K]`` e4m3, ``x [M, K]``, ``out [M, N]``.

    ``scale [ceil(N / SCALE_ROWS), K / 128]`` float32; BLOCK_K divides 128, which divides K. ROUNDED: x is e4m3 and
    ``x_scale [K / 128, M]`` float32. ``partial [splits, M, N]`` float32; ``arrived`` int32, a zero for each tile of
    ``out``, zero again afterwards.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    steps = K // 128
    each = tl.cdiv(tl.cdiv(steps, splits) * 128, BLOCK_K * TOGETHER) * BLOCK_K * TOGETHER
    low = split * each
    high = tl.minimum(low + each, K)
    weights = weight + column.to(tl.int64)[:, None] * K + inner[None, :]
    inputs = x + row[None, :] * x_stride + inner[:, None]
    column_mask = column < N
    row_mask = row < M
    take_turn(DEPENDENT)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    # Scales are asked for one step ahead: their way from the cache would be waited for in every step.
    group = tl.minimum(low // 128, steps - 1)
    factor = _scales(scale, column, group, steps, N, SCALE_ROWS, BLOCK_N)
    by_row = tl.zeros((BLOCK_M,), tl.float32)
    if ROUNDED:
        by_row = tl.load(x_scale + group * scale_stride + row, mask=row_mask, other=0.0)
    for start in range(low, high, BLOCK_K * TOGETHER):
        for turn in tl.static_range(TOGETHER):
            k = start + turn * BLOCK_K
            by_column = factor
            scales = by_row
            group = tl.minimum((k + BLOCK_K) // 128, steps - 1)
            factor = _scales(scale, column, group, steps, N, SCALE_ROWS, BLOCK_N)
            if EVEN_N:
                left = tl.load(weights + k)
            else:
                left = tl.load(weights + k, mask=column_mask[:, None], other=0.0)
            right = tl.load(inputs + k, mask=row_mask[None, :], other=0.0)
            if ROUNDED:
                by_row = tl.load(x_scale + group * scale_stride + row, mask=row_mask, other=0.0)
                acc += tl.dot(left, right) * (by_column[:, None] * scales[None, :])
            else:
                wide = _widened(left, right.dtype)
                acc += tl.dot(wide, right, input_precision=PRECISION) * by_column[:, None]
    place = row[None, :].to(tl.int64) * N + column[:, None]
    mask = column_mask[:, None] & row_mask[None, :]
    if SPLIT:
        size = M.to(tl.int64) * N
        tl.store(partial + split * size + place, acc, mask=mask)
        counter = arrived + tl.program_id(2) * tl.num_programs(0) + tile
        tl.debug_barrier()  # every thread's part is written before one thread says so
        if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for part in range(splits):
                acc += tl.load(partial + part * size + place, mask=mask, other=0.0, cache_modifier=".cg")
            if BIAS:
                acc += tl.load(bias + column, mask=column_mask, other=0.0).to(tl.float32)[:, None]
            tl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)
            tl.store(counter, 0)
    else:
        if BIAS:
            acc += tl.load(bias + column, mask=column_mask, other=0.0).to(tl.float32)[:, None]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)


def together(tile: Tile, inner: int) -> int:
    """Steps of 128 elements that a turn of the loop takes: their loads reach the memory side by side."""
    steps = max(1, tile.block_k // 128)
    return steps if inner // 128 % steps == 0 else 1


def launch(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    scale: torch.Tensor,
    scale_rows: int,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile,
    arrived: torch.Tensor,
    *,
    compile_only: bool = False,
) -> None:
    """``out [M, N] = x [M, K] @ weight [N, K].T (+ bias)``, as the kernel says; ``x_scale`` with rows in e4m3."""
    rows, columns, inner = x.shape[0], weight.shape[0], weight.shape[1]
    partial = parts_of(x, columns, tile.splits, out)
    grid = (triton.cdiv(columns, tile.block_n), tile.splits, triton.cdiv(rows, tile.block_m))
    starter(fp8_few_rows_kernel, grid, compile_only=compile_only)(
        x,
        scale if x_scale is None else x_scale,
        weight,
        scale,
        out if bias is None else bias,
        out,
        partial,
        arrived,
        rows,
        columns,
        inner,
        x.stride(0),
        0 if x_scale is None else x_scale.stride(0),
        tile.splits,
        BLOCK_N=tile.block_n,
        BLOCK_M=tile.block_m,
        BLOCK_K=min(tile.block_k, 128),
        TOGETHER=together(tile, inner),
        SCALE_ROWS=scale_rows,
        SPLIT=tile.splits > 1,
        EVEN_N=columns % tile.block_n == 0,
        BIAS=bias is not None,
        ROUNDED=x_scale is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent(x),
    )
