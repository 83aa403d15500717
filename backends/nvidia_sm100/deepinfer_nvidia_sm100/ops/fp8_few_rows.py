"""Products of few rows with FP8 weights: the weight is read once, at one byte an element.

The tile is turned over as in :mod:`.few_rows`. Rows that stay as they are meet weights that are widened in registers,
which is exact; rounded rows (:mod:`.quantise_rows`) meet them in FP8. Sums over 128 inner elements are scaled outside
of the matrix unit. With a tile of two blocks of 128 inner elements, these reach the memory side by side: 256 bytes of a
row of the weight are read at a higher rate than 128.

Floor: bytes of the weight, N·K, for up to about 100 rows (200 where rows are rounded); operations beyond.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .dependent import dependent, take_turn
from .described_rows import describable, described
from .few_rows import Tile, in_pieces, parts_of, uncounted
from .fp8_weight import GROUP
from .starting import starter


@triton.jit
def _scales(scale, column, step, steps, N, SCALE_ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of a tile's weight rows: one number ``[1]`` where they share it, else ``[BLOCK_N]``."""
    if SCALE_ROWS % BLOCK_N == 0:
        return tl.load(scale + (tl.min(column, axis=0) // SCALE_ROWS * steps + step) + tl.arange(0, 1))
    else:
        return tl.load(scale + column // SCALE_ROWS * steps + step, mask=column < N, other=0.0)


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
    DESCRIBED: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (ceil(N / BLOCK_N), splits, ceil(M / BLOCK_M)). ``weight [N, K]`` e4m3, ``x [M, K]``, ``out [M, N]``.

    ``scale [ceil(N / SCALE_ROWS), K / 128]`` float32; BLOCK_K divides 128, which divides K. ROUNDED: x is e4m3 and
    ``x_scale [K / 128, M]`` float32. DESCRIBED: x and weight are descriptors of blocks ``[BLOCK_M, BLOCK_K]`` and
    ``[BLOCK_N, BLOCK_K]``. ``partial [splits, M, N]`` float32; ``arrived`` int32, a zero for each tile of
    ``out``, zero again afterwards.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    first_row = tl.program_id(2) * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    steps = K // 128
    each = tl.cdiv(tl.cdiv(steps, splits) * 128, BLOCK_K * TOGETHER) * BLOCK_K * TOGETHER
    low = split * each
    high = tl.minimum(low + each, K)
    column_mask = column < N
    row_mask = row < M
    if not DESCRIBED:
        weights = weight + column.to(tl.int64)[:, None] * K + inner[None, :]
        inputs = x + row[None, :] * x_stride + inner[:, None]
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
            if DESCRIBED:
                left = weight.load([tile * BLOCK_N, k])
                right = x.load([first_row, k]).T
            else:
                if EVEN_N:
                    left = tl.load(weights + k)
                else:
                    left = tl.load(weights + k, mask=column_mask[:, None], other=0.0)
                right = tl.load(inputs + k, mask=row_mask[None, :], other=0.0)
            if ROUNDED:
                by_row = tl.load(x_scale + group * scale_stride + row, mask=row_mask, other=0.0)
                acc += tl.dot(left, right) * (by_column[:, None] * scales[None, :])
            else:
                # By way of float32, in the order that the matrix unit takes from registers. In one step it is slower.
                wide = left.to(tl.float32).to(right.dtype)
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
    steps = max(1, tile.block_k // GROUP)
    return steps if inner // GROUP % steps == 0 else 1


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
    if uncounted(x):
        pieces = in_pieces(x, x)
        scales = [None] * len(pieces) if x_scale is None else in_pieces(x_scale, x, 1)
        for some, its_scale, its_out in zip(pieces, scales, in_pieces(out, x), strict=True):
            launch(
                some, its_scale, weight, scale, scale_rows, bias, its_out, tile, arrived, compile_only=compile_only
            )  # fmt: skip
        return
    partial = parts_of(x, columns, tile.splits, out)
    step = min(tile.block_k, GROUP)
    describe = tile.described and describable(x) and describable(weight)
    grid = (triton.cdiv(columns, tile.block_n), tile.splits, triton.cdiv(rows, tile.block_m))
    starter(fp8_few_rows_kernel, grid, compile_only=compile_only)(
        described(x, tile.block_m, step) if describe else x,
        scale if x_scale is None else x_scale,
        described(weight, tile.block_n, step) if describe else weight,
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
        BLOCK_K=step,
        TOGETHER=together(tile, inner),
        SCALE_ROWS=scale_rows,
        SPLIT=tile.splits > 1,
        EVEN_N=columns % tile.block_n == 0,
        BIAS=bias is not None,
        ROUNDED=x_scale is not None,
        DESCRIBED=describe,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent(x),
    )
