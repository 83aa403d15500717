"""Matrix products of up to sixteen rows whose weight goes from memory straight to the registers the matrix unit reads.

A program takes 8 or 16 rows of the weight. Its warps share K in pieces of 32 elements each, and ask for ``held`` pieces
before they need the first: 100 to 200 KB are on their way to a multiprocessor. A thread asks for 16 neighbouring bytes
of a row, and these are its operand as they lie, since K is permuted alike for both operands. So there is no copy to
shared memory, no barrier and no pipeline that must fill; the warps' sums meet once, at the end. The weight is asked for
before the kernel waits for the one before it, which cannot have written it: memory works on while one kernel ends and
the next begins.

The matrix unit takes sixteen rows. Where the step has fewer, a tile of them holds the row's next pieces instead,
sixteen for one row, so that one load brings them all; of a product those rows count that are of the weight's piece.

Measured on an H200, alone: 0.89 of the copy bandwidth for 6144 × 2560 at one row, 0.60 to 0.65 for 2560 × 4096 at two
to eight. As in :mod:`.one_row`, not so among the kernels of a step.

Floor: bytes of the weight, 2·N·K in 16 bits.
"""

from __future__ import annotations

import attrs
import torch
import triton
import triton.language as tl

from .dependent import let_next_in, wait_turn
from .ending import Ending
from .finished_tile import store_tile
from .normed_rows import add_tile, norm_scale, row_squares
from .starting import starter

MOST = 16
"""Rows of a step, at most."""
PIECE = 32
"""Elements of K that a warp takes at a time: 16 bytes for each of four threads."""


@triton.jit
def operand(piece, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """``[ROWS, WARPS, 32]`` -> ``[WARPS, ROWS, 32]``, K permuted: eight neighbours of a thread are the two quadruples
    that the matrix unit's layout gives it."""
    return tl.reshape(tl.permute(tl.reshape(piece, (ROWS, WARPS, 4, 2, 4)), (1, 0, 3, 2, 4)), (WARPS, ROWS, 32))


@triton.jit
def stacked(upper, lower, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """Two pieces of ROWS rows as one of twice as many, without moving an element."""
    return tl.reshape(tl.permute(tl.join(upper, lower), (3, 0, 1, 2)), (2 * ROWS, WARPS, 32))


@triton.jit
def eight_columns(weight, column, inner, N, K, EVEN_K: tl.constexpr, GATED: tl.constexpr):
    """A piece of eight of the weight's rows, which are columns of the product."""
    mask = (column < N)[:, None, None]
    if not EVEN_K:
        mask = mask & (inner < K)[None, :, :]
    if GATED:
        column = column % 2 * (N // 2) + column // 2  # gate and what it lets through, by turns
    place = (column.to(tl.int64) * K)[:, None, None] + inner[None, :, :]
    return tl.load(weight + place, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def columns_piece(
    weight, first, inner, N, K, COLUMNS: tl.constexpr, WARPS: tl.constexpr, EVEN_K: tl.constexpr, GATED: tl.constexpr
):
    """``[COLUMNS, WARPS, 32]`` of the weight."""
    column = first + tl.arange(0, 8)
    piece = eight_columns(weight, column, inner, N, K, EVEN_K, GATED)
    if COLUMNS == 16:
        piece = stacked(piece, eight_columns(weight, column + 8, inner, N, K, EVEN_K, GATED), 8, WARPS)
    return piece


@triton.jit
def eight_rows(
    x, stride, place, first, inner, M, K,
    WARPS: tl.constexpr, TURNS: tl.constexpr, PIECES: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Eight of a tile's rows: row ``place`` is piece ``first + place % TURNS`` of the step's row ``place // TURNS``."""
    which = first + place % TURNS
    mask = (place // TURNS < M)[:, None, None]
    if PIECES % TURNS:
        mask = mask & (which < PIECES)[:, None, None]
    at = inner[None, :, :] + (which * (32 * WARPS))[:, None, None]
    if not EVEN_K:
        mask = mask & (at < K)
    return tl.load(x + (place // TURNS * stride)[:, None, None] + at, mask=mask, other=0.0)


@triton.jit
def rows_tile(
    x, stride, first, inner, M, K,
    WARPS: tl.constexpr, TURNS: tl.constexpr, PIECES: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """``[16, WARPS, 32]``: TURNS pieces of K from ``first`` on, of the step's rows."""
    place = tl.arange(0, 8)
    upper = eight_rows(x, stride, place, first, inner, M, K, WARPS, TURNS, PIECES, EVEN_K)
    lower = eight_rows(x, stride, place + 8, first, inner, M, K, WARPS, TURNS, PIECES, EVEN_K)
    return stacked(upper, lower, 8, WARPS)


@triton.jit(do_not_specialize=["M", "splits", "limit", "parts", "eps"])
def held_rows_kernel(
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
    limit,
    residual,
    norm_weight,
    squares,
    parts,
    eps,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    HELD: tl.constexpr,
    PIECES: tl.constexpr,
    AHEAD: tl.constexpr,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    LIMITED: tl.constexpr,
    ROUNDED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (ceil(N / COLUMNS), splits); a split has PIECES pieces for each warp. Tensors: as ``few_rows_kernel``'s.

    ROWS: 1, 2, 4, 8 or 16, at least M. HELD pieces of the weight and AHEAD tiles of rows are asked for ahead.
    """
    TURNS: tl.constexpr = 16 // ROWS
    TILES: tl.constexpr = (PIECES + TURNS - 1) // TURNS
    step: tl.constexpr = 32 * WARPS
    tile = tl.program_id(0)
    first = tile * COLUMNS
    inner = tl.program_id(1) * (step * PIECES) + tl.arange(0, WARPS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    row = tl.arange(0, ROWS)
    column = first + tl.arange(0, COLUMNS)
    row_mask = row < M
    column_mask = column < N
    let_next_in(DEPENDENT)
    held = (columns_piece(weight, first, inner, N, K, COLUMNS, WARPS, EVEN_K, GATED),)
    for piece in tl.static_range(1, HELD):
        held += (columns_piece(weight, first, inner + piece * step, N, K, COLUMNS, WARPS, EVEN_K, GATED),)  # type: ignore[assignment]
    if ADD:
        factor = tl.load(norm_weight + column, mask=column_mask, other=0.0).to(tl.float32)  # no kernel writes it
    wait_turn(DEPENDENT)
    given = (rows_tile(x, x_stride, 0, inner, M, K, WARPS, TURNS, PIECES, EVEN_K),)
    for turn in tl.static_range(1, AHEAD):
        given += (rows_tile(x, x_stride, turn * TURNS, inner, M, K, WARPS, TURNS, PIECES, EVEN_K),)  # type: ignore[assignment]
    place = row[None, :].to(tl.int64) * N + column[:, None]
    mask = column_mask[:, None] & row_mask[None, :]
    if ADD:
        before = tl.load(residual + place, mask=mask, other=0.0)
    if PARTS:
        factor_of_row = norm_scale(row_squares(squares, row, row_mask, M, parts, PARTS), K, eps)
    turn_of = (tl.arange(0, 16) % TURNS)[None, :, None]
    sums = tl.zeros((WARPS, 16, COLUMNS), tl.float32)
    for piece in tl.static_range(PIECES):
        left = operand(given[piece // TURNS], 16, WARPS)
        right = tl.permute(operand(held[piece], COLUMNS, WARPS), (0, 2, 1))
        if TURNS == 1:
            sums = tl.dot(left, right, sums, input_precision="ieee")
        else:
            sums += tl.where(turn_of == piece % TURNS, tl.dot(left, right, input_precision="ieee"), 0.0)
        if piece + HELD < PIECES:
            later = inner + (piece + HELD) * step
            held += (columns_piece(weight, first, later, N, K, COLUMNS, WARPS, EVEN_K, GATED),)  # type: ignore[assignment]
        if piece % TURNS == TURNS - 1 and piece // TURNS + AHEAD < TILES:
            later_tile = (piece // TURNS + AHEAD) * TURNS
            given += (rows_tile(x, x_stride, later_tile, inner, M, K, WARPS, TURNS, PIECES, EVEN_K),)  # type: ignore[assignment]
    acc = tl.trans(tl.sum(tl.reshape(tl.sum(sums, axis=0), (ROWS, TURNS, COLUMNS)), axis=1))
    last = True
    if SPLIT:
        size = M.to(tl.int64) * N
        tl.store(partial + tl.program_id(1) * size + place, acc, mask=mask)
        tl.debug_barrier()  # every thread's part is written before one thread says so
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1
        if last:
            acc = tl.zeros((COLUMNS, ROWS), tl.float32)
            for part in range(splits):
                acc += tl.load(partial + part * size + place, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
    if last:
        if PARTS:
            acc *= factor_of_row[None, :]
        if ADD:
            add_tile(
                out, residual, factor, squares, acc, before, bias, tile, row, row_mask, column, column_mask, M, N, BIAS
            )
        else:
            if GATED:
                column = column % 2 * (N // 2) + column // 2
            store_tile(
                out, acc, bias, tile, row, row_mask, column, column_mask, N, limit,
                COLUMNS, ROWS, BIAS, GATED, LIMITED, ROUNDED,
            )  # fmt: skip


@attrs.frozen(kw_only=True)
class HeldTile:
    """One way to multiply so. ``block_n``: rows of the weight, 8 or 16. ``held``: pieces of the weight, and ``ahead``:
    tiles of the step's rows, that are asked for before they are needed. ``registers`` of a thread at most; 0: as many
    as the compiler takes."""

    block_n: int
    warps: int
    held: int
    splits: int
    ahead: int
    registers: int = 0

    def pieces(self, inner: int) -> int:
        """Pieces of K that each warp of a split has."""
        return int(triton.cdiv(inner, PIECE * self.warps * self.splits))


def unit_rows(rows: int) -> int:
    """Rows of a step that share a compiled kernel: the next of 1, 4, 8 and 16."""
    return next(size for size in (1, 4, 8, MOST) if size >= rows)


def launch_held(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tile: HeldTile,
    arrived: torch.Tensor,
    partial: torch.Tensor,
    ending: Ending,
) -> None:
    """As :func:`~.few_rows.launch`, which calls it for such tiles; of at most :data:`MOST` rows."""
    rows, (columns, inner) = x.shape[0], weight.shape
    block_m = unit_rows(rows)
    pieces = tile.pieces(inner)
    limits = {"maxnreg": tile.registers} if tile.registers else {}
    grid = (triton.cdiv(columns, tile.block_n), tile.splits)
    starter(held_rows_kernel, grid, compile_only=ending.compile_only)(
        x,
        weight,
        out if ending.bias is None else ending.bias,
        out,
        partial,
        arrived,
        rows,
        columns,
        inner,
        x.stride(0),
        tile.splits,
        ending.clamp,
        *ending.normed,
        COLUMNS=tile.block_n,
        ROWS=block_m,
        WARPS=tile.warps,
        HELD=min(tile.held, pieces),
        PIECES=pieces,
        AHEAD=min(tile.ahead, triton.cdiv(pieces, 16 // block_m)),
        SPLIT=tile.splits > 1,
        EVEN_K=inner == PIECE * tile.warps * tile.splits * pieces,
        num_warps=tile.warps,
        **limits,
        **ending.constants(),
    )
