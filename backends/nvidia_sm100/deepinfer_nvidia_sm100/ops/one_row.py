"""Matrix products of one row: the whole piece of the weight that a program multiplies is asked for at once.

A program takes some rows of the weight and holds its part of them in registers: nothing is copied to shared memory, no
pipeline has to fill, and many small programs share a multiprocessor, so that 100 to 200 KB are on their way to it. The
weight is asked for before the kernel waits for the one before it, which cannot have written it: memory works on while
one kernel ends and the next begins. From two rows on multiply-adds take longer than reading: :mod:`.held_rows`.

Measured on an H200, alone: 0.95 of the copy bandwidth for 19456 × 2560, 0.70 for 2560 × 4096. Among the other kernels
of a step such products were no faster, so ``fused.between_attention`` has none by the package's table.

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


@triton.jit
def part_of(weight, column, inner, N, K, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, GATED: tl.constexpr):
    """``[columns, inner]`` of the weight. It is read once, so it leaves the caches first."""
    mask = (column < N)[:, None] & (inner < K)[None, :]
    if GATED:
        column = column % 2 * (N // 2) + column // 2  # gate and what it lets through, by turns
    place = weight + (column.to(tl.int64)[:, None] * K + inner[None, :])
    if EVEN_N and EVEN_K:
        return tl.load(place, eviction_policy="evict_first")
    else:
        return tl.load(place, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["splits", "limit", "parts", "eps"])
def one_row_kernel(
    x,
    weight,
    bias,
    out,
    partial,
    arrived,
    N,
    K,
    splits,
    limit,
    residual,
    norm_weight,
    squares,
    parts,
    eps,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TURNS: tl.constexpr,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    LIMITED: tl.constexpr,
    ROUNDED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (ceil(N / BLOCK_N), splits); a split has TURNS times BLOCK_K elements of K. ``x [1, K]``, ``out [1, N]``;
    other tensors as ``few_rows_kernel`` has them."""
    tile = tl.program_id(0)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = column < N
    inner = tl.program_id(1) * (BLOCK_K * TURNS) + tl.arange(0, BLOCK_K)
    row = tl.arange(0, 1)
    row_mask = row < 1
    let_next_in(DEPENDENT)
    held = (part_of(weight, column, inner, N, K, EVEN_N, EVEN_K, GATED),)
    for turn in tl.static_range(1, TURNS):
        later = inner + turn * BLOCK_K
        held += (part_of(weight, column, later, N, K, EVEN_N, EVEN_K, GATED),)  # type: ignore[assignment]
    if ADD:
        factor = tl.load(norm_weight + column, mask=column_mask, other=0.0).to(tl.float32)  # no kernel writes it
    wait_turn(DEPENDENT)
    if ADD:
        before = tl.load(residual + column, mask=column_mask, other=0.0)[:, None]
    if PARTS:
        factor_of_row = norm_scale(row_squares(squares, row, row_mask, 1, parts, PARTS), K, eps)
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for turn in tl.static_range(TURNS):
        at = inner + turn * BLOCK_K
        given = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
        sums = tl.fma(held[turn].to(tl.float32), tl.broadcast_to(given[None, :], (BLOCK_N, BLOCK_K)), sums)
    found = tl.sum(sums, axis=1)
    last = True
    if SPLIT:
        tl.store(partial + tl.program_id(1) * N + column, found, mask=column_mask)
        tl.debug_barrier()  # every thread's part is written before one thread says so
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1
        if last:
            found = tl.zeros((BLOCK_N,), tl.float32)
            for part in range(splits):
                found += tl.load(partial + part * N + column, mask=column_mask, other=0.0, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
    if last:
        acc = found[:, None]
        if PARTS:
            acc *= factor_of_row[None, :]
        if ADD:
            add_tile(
                out, residual, factor, squares, acc, before, bias, tile, row, row_mask, column, column_mask, 1, N, BIAS
            )
        else:
            if GATED:
                column = column % 2 * (N // 2) + column // 2
            store_tile(
                out, acc, bias, tile, row, row_mask, column, column_mask, N, limit,
                BLOCK_N, 1, BIAS, GATED, LIMITED, ROUNDED,
            )  # fmt: skip


@attrs.frozen(kw_only=True)
class OneRowTile:
    """One way to multiply so: rows of the weight and elements of K of a block, parts of K, warps."""

    block_n: int
    block_k: int
    splits: int
    warps: int

    def turns(self, inner: int) -> int:
        """Blocks of K that a program holds."""
        return int(triton.cdiv(inner, self.block_k * self.splits))

    def registers(self, inner: int) -> int:
        """Of a thread, for the weight alone."""
        return self.turns(inner) * self.block_n * self.block_k // (64 * self.warps)


def launch_one_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tile: OneRowTile,
    arrived: torch.Tensor,
    partial: torch.Tensor,
    ending: Ending,
) -> None:
    """As :func:`~.few_rows.launch`, which calls it for such tiles."""
    columns, inner = weight.shape
    turns = tile.turns(inner)
    starter(one_row_kernel, (triton.cdiv(columns, tile.block_n), tile.splits), compile_only=ending.compile_only)(
        x,
        weight,
        out if ending.bias is None else ending.bias,
        out,
        partial,
        arrived,
        columns,
        inner,
        tile.splits,
        ending.clamp,
        *ending.normed,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        TURNS=turns,
        SPLIT=tile.splits > 1,
        EVEN_N=columns % tile.block_n == 0,
        EVEN_K=inner == turns * tile.block_k * tile.splits,
        num_warps=tile.warps,
        **ending.constants(),
    )
