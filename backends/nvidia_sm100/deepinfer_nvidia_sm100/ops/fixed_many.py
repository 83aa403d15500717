"""Products of many rows whose sums over K are cut as :mod:`.few_rows` cuts them for few.

A program holds a part's sum and that of the parts before it, so that nothing but the result is written. Tiles come by
tensor descriptors.

Floor: operations, 2·M·N·K.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
import triton
import triton.language as tl

from .dependent import dependent, take_turn
from .described_rows import describable, described
from .starting import starter

TOGETHER = 8
"""Tiles of rows that run side by side, so that they read the same weights."""


@triton.jit(do_not_specialize=["M"])
def many_rows_kernel(
    x,
    weight,
    bias,
    out,
    M,
    N,
    K,
    length,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a tile of ``out [M, N]``. ``x`` and ``weight`` are descriptors of blocks ``[BLOCK_M, BLOCK_K]`` and
    ``[BLOCK_N, BLOCK_K]``; a part has ``length`` elements of K, a multiple of BLOCK_K."""
    tall, wide = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    first = tile // (GROUP * wide) * GROUP
    height = tl.minimum(tall - first, GROUP)
    within = tile % (GROUP * wide)
    row = (first + within % height) * BLOCK_M
    column = within // height * BLOCK_N
    take_turn(DEPENDENT)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for part in range(PARTS):
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(part * length, tl.minimum((part + 1) * length, K), BLOCK_K):
            acc = tl.dot(x.load([row, k]), weight.load([column, k]).T, acc, input_precision=PRECISION)
        total = acc if PARTS == 1 else total + acc
    rows = row + tl.arange(0, BLOCK_M)
    columns = column + tl.arange(0, BLOCK_N)
    if BIAS:
        total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    place = rows[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


@attrs.frozen(kw_only=True)
class ManyTile:
    """Rows and columns of a program's tile, the step along K, stages of the pipeline, warps."""

    rows: int
    columns: int
    step: int
    stages: int
    warps: int


def servable(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the copy engine can read both."""
    return describable(x) and describable(weight)


def launch_many(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: ManyTile,
    parts: int,
    length: int,
    *,
    compile_only: bool = False,
) -> None:
    """``out [M, N] = x [M, K] @ weight [N, K].T (+ bias)`` over ``parts`` stretches of ``length`` elements of K."""
    options: dict[str, Any] = dependent(x)
    grid = (triton.cdiv(x.shape[0], tile.rows) * triton.cdiv(weight.shape[0], tile.columns),)
    starter(many_rows_kernel, grid, compile_only=compile_only)(
        described(x, tile.rows, tile.step),
        described(weight, tile.columns, tile.step),
        out if bias is None else bias,
        out,
        x.shape[0],
        weight.shape[0],
        weight.shape[1],
        length,
        PARTS=parts,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.step,
        GROUP=TOGETHER,
        BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
        **options,
    )
