"""Products of FP8 rows with FP8 weights, both scaled by blocks of 128 along the inner dimension.

The matrix unit adds products of FP8 with few bits, so what it adds over 128 elements is scaled and added to a float32
sum outside of it. That costs one multiply-add for each element of the tile in every step of the loop, during which
the matrix unit waits; a tile of 256 columns is done in two halves, so that both its sums fit into registers.

Floor: operations, 2·M·N·K at the rate of FP8; bytes of the weight, N·K, below about 300 rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .dependent import dependent, take_turn
from .starting import starter

GROUP = 128
"""Inner elements that share a scale, and one step of the loop."""


@triton.jit
def _tile_of(number, rows, columns, TOGETHER: tl.constexpr):
    """Row and column of a tile: TOGETHER rows of tiles are walked column by column, so that the cache serves them."""
    each = TOGETHER * columns
    first = number // each * TOGETHER
    height = tl.minimum(rows - first, TOGETHER)
    return first + number % each % height, number % each // height


@triton.jit
def _store(out, out_box, acc, bias, row, column, top, left, M, N, BIAS: tl.constexpr, BOX: tl.constexpr):
    if BIAS:
        acc += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    if BOX:
        out_box.store([top, left], acc.to(out.dtype.element_ty))
    else:
        place = row[:, None].to(tl.int64) * N + column[None, :]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=(row < M)[:, None] & (column < N)[None, :])


@triton.jit(do_not_specialize=["M", "scale_stride"])
def fp8_many_rows_kernel(
    x,
    x_scale,
    weight,
    scale,
    bias,
    out,
    out_box,
    M,
    N,
    K,
    scale_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HALVES: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
    BIAS: tl.constexpr,
    BOX: tl.constexpr,
    PREFETCH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (tiles). Descriptors ``x [M, K]`` and ``weight [N, K]`` of blocks (BLOCK_M, 128) and (BLOCK_N, 128), e4m3.

    ``x_scale [K / 128, M]``, ``scale [ceil(N / SCALE_ROWS), K / 128]`` float32, ``out [M, N]``. A program's tile has
    BLOCK_N * HALVES columns; SCALE_ROWS is a multiple of BLOCK_N.
    """
    take_turn(DEPENDENT)
    WIDTH: tl.constexpr = BLOCK_N * HALVES
    rows = tl.cdiv(M, BLOCK_M)
    columns = tl.cdiv(N, WIDTH)
    steps = K // 128
    for number in range(tl.program_id(0), rows * columns, tl.num_programs(0)):
        tile_row, tile_column = _tile_of(number, rows, columns, TOGETHER)
        top = tile_row * BLOCK_M
        left = tile_column * WIDTH
        row = top + tl.arange(0, BLOCK_M)
        row_scale = x_scale + row
        first_scale = scale + left // SCALE_ROWS * steps
        second_scale = scale + tl.minimum(left + BLOCK_N, N - 1) // SCALE_ROWS * steps
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        other = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        # Scales are asked for one step ahead: their way from the cache is as long as a step's products.
        by_row = tl.load(row_scale, mask=row < M, other=0.0)
        first = tl.load(first_scale)
        second = tl.load(second_scale)
        for step in range(steps):
            scales = by_row
            one = first
            two = second
            if PREFETCH:
                ahead = tl.minimum(step + 1, steps - 1)
                by_row = tl.load(row_scale + ahead * scale_stride, mask=row < M, other=0.0)
                first = tl.load(first_scale + ahead)
                if HALVES == 2:
                    second = tl.load(second_scale + ahead)
            else:
                scales = tl.load(row_scale + step * scale_stride, mask=row < M, other=0.0)
                one = tl.load(first_scale + step)
                two = tl.load(second_scale + step)
            a = x.load([top, step * 128])
            acc += tl.dot(a, weight.load([left, step * 128]).T) * (scales * one)[:, None]
            if HALVES == 2:
                b = weight.load([left + BLOCK_N, step * 128])
                other += tl.dot(a, b.T) * (scales * two)[:, None]
        column = left + tl.arange(0, BLOCK_N)
        _store(out, out_box, acc, bias, row, column, top, left, M, N, BIAS, BOX)
        if HALVES == 2:
            _store(out, out_box, other, bias, row, column + BLOCK_N, top, left + BLOCK_N, M, N, BIAS, BOX)


@attrs.frozen(kw_only=True)
class ManyTile:
    """One way to run the kernel. ``together``: rows of tiles that share the cache."""

    block_m: int
    block_n: int
    halves: int
    stages: int
    warps: int
    together: int = 8
    each: int = 1
    box: bool = False
    prefetch: bool = True

    @property
    def shared_bytes(self) -> int:
        """Of the pipeline's buffers."""
        return GROUP * (self.block_m + self.block_n * self.halves) * self.stages


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # the interpreter's tests
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def operands(
    describe: Callable[[torch.Tensor, list[int]], Any],
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    height: int,
    width: int,
    box: list[int] | None,
) -> tuple[Any, ...]:
    """What kernels of many rows take first: rows and weight by blocks of ``height`` and ``width`` times GROUP, and
    ``out`` by blocks of ``box``, where the copy engine writes it. ``describe``: makes a descriptor for such blocks."""
    return (
        describe(x, [height, GROUP]),
        x_scale,
        describe(weight, [width, GROUP]),
        scale,
        out if bias is None else bias,
        out,
        out if box is None else describe(out, box),
        *x.shape[:1],
        *weight.shape,
        x_scale.stride(0),
    )


def launch(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    scale_rows: int,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: ManyTile,
    *,
    compile_only: bool = False,
) -> None:
    """``out [M, N] = x [M, K] @ weight [N, K].T (+ bias)``, as the kernel says."""
    rows, columns = out.shape
    tiles = triton.cdiv(rows, tile.block_m) * triton.cdiv(columns, tile.block_n * tile.halves)
    programs = min(tiles, tile.each * multiprocessors(x.device)) if tile.each else tiles
    box = tile.box and columns * out.element_size() % 16 == 0  # the copy engine's rows
    boxes = [tile.block_m, tile.block_n] if box else None
    given = x, x_scale, weight, scale, bias, out, tile.block_m, tile.block_n, boxes
    starter(fp8_many_rows_kernel, (programs,), compile_only=compile_only)(
        *operands(TensorDescriptor.from_tensor, *given),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        HALVES=tile.halves,
        SCALE_ROWS=scale_rows,
        TOGETHER=tile.together,
        BIAS=bias is not None,
        BOX=box,
        PREFETCH=tile.prefetch,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent(x),
    )
