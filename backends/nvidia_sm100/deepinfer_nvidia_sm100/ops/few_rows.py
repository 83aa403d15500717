"""Matrix products with few rows: the weight is read once, in long pipelined loads, and that is all the time it takes.

The tile is turned over: weight rows are the matrix unit's rows (64 of them feed ``wgmma`` or ``tcgen05``) and the
step's rows its columns, so that 1 to 64 rows cost one reading of the weight. Long products are split over K; the
program that arrives last adds the parts in order, so that results do not depend on who that was.

With GATED the weight's first half is a gate and its second goes through it (``fused.gated_linear``): a tile takes rows
of both, by turns, so that one program has what an activation needs, and the product is never written.

Floor: bytes of the weight, 2·N·K in 16 bits, for up to about 100 rows; operations beyond.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
import triton
import triton.language as tl

from .dependent import dependent, let_next_in_late, take_turn
from .described_rows import describable, launch_described
from .ending import Ending
from .finished_tile import store_tile
from .held_rows import HeldTile, launch_held
from .normed_rows import Add, Scale, add_tile, arguments, norm_scale, row_squares
from .one_row import OneRowTile, launch_one_row
from .starting import starter

UNIT = 128
"""Elements of K: parts of a split product are multiples of it."""
COUNTED = 2**31
"""Elements of the rows of one launch, at most: kernels count them in 32 bits."""


@triton.jit(do_not_specialize=["M", "splits", "limit", "parts", "eps"])
def few_rows_kernel(
    x,
    weight,
    bias,
    out,
    partial,
    arrived,
    M,
    N,
    K,
    x_stride,
    splits,
    length,
    limit,
    residual,
    norm_weight,
    squares,
    parts,
    eps,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    LIMITED: tl.constexpr,
    ROUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (ceil(N / BLOCK_N), splits, ceil(M / BLOCK_M)). ``weight [N, K]``, ``x [M, K]``, ``out [M, N]``; GATED:
    ``out [M, N / 2]``, and LIMITED clamps as ``pointwise.swiglu`` does. A part has ``length`` elements of K.

    ``partial [splits, M, N]`` float32; ``arrived`` int32, a zero for each tile of ``out``, zero again afterwards.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = column < N
    if GATED:
        column = column % 2 * (N // 2) + column // 2  # gate and what it lets through, by turns
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    low = split * length
    high = tl.minimum(low + length, K)
    weights = weight + column.to(tl.int64)[:, None] * K + inner[None, :]
    inputs = x + row[None, :] * x_stride + inner[:, None]
    row_mask = row < M
    if ADD:
        factor = tl.load(norm_weight + column, mask=column_mask, other=0.0).to(tl.float32)  # no kernel writes it
    take_turn(DEPENDENT)
    # Asked for before the product, so that nothing waits for them behind it.
    if ADD:
        before = tl.load(
            residual + (row[None, :].to(tl.int64) * N + column[:, None]),
            mask=column_mask[:, None] & row_mask[None, :],
            other=0.0,
        )
    if PARTS:
        found = row_squares(squares, row, row_mask, M, parts, PARTS)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(low, high, BLOCK_K):
        if EVEN_K:
            if EVEN_N:
                left = tl.load(weights + k)
            else:
                left = tl.load(weights + k, mask=column_mask[:, None], other=0.0)
            right = tl.load(inputs + k, mask=row_mask[None, :], other=0.0)
        else:
            inside = k + inner < K
            left = tl.load(weights + k, mask=column_mask[:, None] & inside[None, :], other=0.0)
            right = tl.load(inputs + k, mask=row_mask[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    let_next_in_late(DEPENDENT)
    if SPLIT:
        size = M.to(tl.int64) * N
        place = row[None, :].to(tl.int64) * N + column[:, None]
        mask = column_mask[:, None] & row_mask[None, :]
        tl.store(partial + split * size + place, acc, mask=mask)
        counter = arrived + tl.program_id(2) * tl.num_programs(0) + tile
        tl.debug_barrier()  # every thread's part is written before one thread says so
        if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for part in range(splits):
                acc += tl.load(partial + part * size + place, mask=mask, other=0.0, cache_modifier=".cg")
            if PARTS:
                acc *= norm_scale(found, K, eps)[None, :]
            if ADD:
                add_tile(
                    out, residual, factor, squares, acc, before, bias, tile, row, row_mask, column, column_mask, M, N,
                    BIAS,
                )  # fmt: skip
            else:
                store_tile(
                    out, acc, bias, tile, row, row_mask, column, column_mask, N, limit,
                    BLOCK_N, BLOCK_M, BIAS, GATED, LIMITED, ROUNDED,
                )  # fmt: skip
            tl.store(counter, 0)
    elif ADD:
        add_tile(
            out, residual, factor, squares, acc, before, bias, tile, row, row_mask, column, column_mask, M, N, BIAS
        )
    else:
        if PARTS:
            acc *= norm_scale(found, K, eps)[None, :]
        store_tile(
            out, acc, bias, tile, row, row_mask, column, column_mask, N, limit,
            BLOCK_N, BLOCK_M, BIAS, GATED, LIMITED, ROUNDED,
        )  # fmt: skip


@attrs.frozen(kw_only=True)
class Tile:
    """One way to multiply. ``described``: by :mod:`.described_rows`, which for a gate takes no splits."""

    block_n: int
    block_m: int
    block_k: int
    splits: int
    stages: int
    warps: int
    described: bool = False
    late: bool = False

    @property
    def shared_bytes(self) -> int:
        """Of the pipeline's buffers, at two bytes an element."""
        return 2 * self.block_k * (self.block_n + self.block_m) * self.stages


AnyTile = Tile | OneRowTile | HeldTile
"""Ways to multiply few rows that a table of tuned tiles may name."""


def part_length(inner: int, splits: int, step: int) -> int:
    """Elements of K in each of so many parts, but perhaps the last: the same for every step up to :data:`UNIT`."""
    unit = max(UNIT, step)
    units = (inner + unit - 1) // unit
    return (units + splits - 1) // splits * unit


def parts_of(x: torch.Tensor, columns: int, splits: int, out: torch.Tensor) -> torch.Tensor:
    """Memory for the parts of a product split over K, ``[splits, M, columns]`` float32; ``out`` where it is not."""
    if splits == 1:
        return out
    return torch.empty((splits, x.shape[0], columns), dtype=torch.float32, device=x.device)


def uncounted(x: torch.Tensor) -> bool:
    """Whether the rows of ``x`` have more elements than one launch counts."""
    return x.shape[0] * x.stride(0) > COUNTED


def in_pieces(tensor: torch.Tensor, x: torch.Tensor, dim: int = 0) -> Sequence[torch.Tensor]:
    """Cut ``tensor`` along ``dim``, which counts the rows of ``x``, so that of these no piece has too many elements."""
    pieces: tuple[torch.Tensor, ...] = tensor.split(max(1, COUNTED // x.stride(0)), dim)
    return pieces


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: AnyTile,
    arrived: torch.Tensor,
    *,
    gated: bool = False,
    limit: float | None = None,
    rounded: bool = False,
    add: Add | None = None,
    scale: Scale | None = None,
    compile_only: bool = False,
) -> None:
    """``out [M, N] = x [M, K] @ weight [N, K].T (+ bias)``; ``arrived`` holds a zero for each tile of out.

    ``gated``: ``out [M, N / 2]`` is ``pointwise.swiglu`` of that product, clamped at ``limit`` if there is one.
    ``rounded``: of that product rounded to out's dtype, as it is where two operators do this.
    """
    rows, columns, inner = x.shape[0], weight.shape[0], weight.shape[1]
    if uncounted(x):
        assert (add, scale) == (None, None), "regions are of few rows"
        more: dict[str, Any] = {"gated": gated, "limit": limit, "rounded": rounded, "compile_only": compile_only}
        for some, its_out in zip(*(in_pieces(each, x) for each in (x, out)), strict=True):
            launch(some, weight, bias, its_out, tile, arrived, **more)
        return
    partial = parts_of(x, columns, tile.splits, out)
    options = dependent(x)
    if isinstance(tile, Tile) and tile.late and options["DEPENDENT"]:
        options["DEPENDENT"] = 2
    normed, flags = arguments(add, scale, out)
    ending = Ending(
        bias=bias,
        gated=gated,
        limit=limit,
        rounded=rounded,
        normed=normed,
        flags=flags,
        options=options,
        compile_only=compile_only,
    )
    if isinstance(tile, OneRowTile):
        launch_one_row(x, weight, out, tile, arrived, partial, ending)
        return
    if isinstance(tile, HeldTile):
        launch_held(x, weight, out, tile, arrived, partial, ending)
        return
    length = part_length(inner, tile.splits, tile.block_k)
    if tile.described and describable(x) and describable(weight):
        launch_described(x, weight, out, tile, arrived, partial, ending, length=length)
        return
    grid = (triton.cdiv(columns, tile.block_n), tile.splits, triton.cdiv(rows, tile.block_m))
    starter(few_rows_kernel, grid, compile_only=compile_only)(
        x,
        weight,
        out if bias is None else bias,
        out,
        partial,
        arrived,
        rows,
        columns,
        inner,
        x.stride(0),
        tile.splits,
        length,
        ending.clamp,
        *normed,
        BLOCK_N=tile.block_n,
        BLOCK_M=tile.block_m,
        BLOCK_K=tile.block_k,
        SPLIT=tile.splits > 1,
        EVEN_N=columns % tile.block_n == 0,
        EVEN_K=inner % tile.block_k == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
        **ending.constants(),
    )
