"""Matrix products with few rows as in :mod:`.few_rows`, whose tiles the copy engine brings (tensor descriptors).

Threads then neither compute addresses nor issue loads. Measured on an H200 by itself: the merged weight of a gated
layer takes 1.22 times its floor at 64 rows, activation included, where cuBLAS takes 1.36 without. With few rows, steps
became 15 % slower though every product by itself was faster, so the tables use this above 32 rows only.

Floor: bytes of the weight, 2·N·K in 16 bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .dependent import let_next_in_late, take_turn
from .ending import Ending
from .normed_rows import add_tile, norm_scale, row_squares
from .starting import starter


@triton.jit(do_not_specialize=["M", "splits", "parts", "eps"])
def described_rows_kernel(
    x,
    weight,
    bias,
    out,
    partial,
    arrived,
    M,
    N,
    K,
    splits,
    length,
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
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid and arguments as ``few_rows_kernel``; ``x`` and ``weight`` are descriptors of blocks
    ``[BLOCK_M, BLOCK_K]`` and ``[BLOCK_N, BLOCK_K]``: what lies outside of either tensor reads as zero."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    first_row = tl.program_id(2) * BLOCK_M
    low = split * length
    high = tl.minimum(low + length, K)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = first_row + tl.arange(0, BLOCK_M)
    place = row[None, :].to(tl.int64) * N + column[:, None]
    mask = (column < N)[:, None] & (row < M)[None, :]
    if ADD:
        factor = tl.load(norm_weight + column, mask=column < N, other=0.0).to(tl.float32)  # no kernel writes it
    take_turn(DEPENDENT)
    # Asked for before the product, so that nothing waits for them behind it.
    if ADD:
        before = tl.load(residual + place, mask=mask, other=0.0)
    if PARTS:
        found = row_squares(squares, row, row < M, M, parts, PARTS)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(low, high, BLOCK_K):
        left = weight.load([tile * BLOCK_N, k])
        right = x.load([first_row, k])
        acc = tl.dot(left, right.T, acc, input_precision=PRECISION)
    let_next_in_late(DEPENDENT)
    last = True
    if SPLIT:
        size = M.to(tl.int64) * N
        tl.store(partial + split * size + place, acc, mask=mask)
        counter = arrived + tl.program_id(2) * tl.num_programs(0) + tile
        tl.debug_barrier()  # every thread's part is written before one thread says so
        last = tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1
        if last:
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for part in range(splits):
                acc += tl.load(partial + part * size + place, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(counter, 0)
    if last:
        if PARTS:
            acc *= norm_scale(found, K, eps)[None, :]
        if ADD:
            add_tile(
                out, residual, factor, squares, acc, before, bias, tile, row, row < M, column, column < N, M, N, BIAS
            )
        else:
            if BIAS:
                acc += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[:, None]
            tl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "limit", "parts", "eps"])
def described_gated_kernel(
    x,
    weight,
    bias,
    out,
    M,
    WIDTH,
    K,
    limit,
    squares,
    parts,
    eps,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    LIMITED: tl.constexpr,
    ROUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (ceil(WIDTH / (BLOCK_N / 2)), 1, ceil(M / BLOCK_M)). ``weight [2 * WIDTH, K]``, gate first, by blocks
    ``[BLOCK_N / 2, BLOCK_K]``; ``out [M, WIDTH]``."""
    half: tl.constexpr = BLOCK_N // 2
    tile = tl.program_id(0) * half
    first_row = tl.program_id(2) * BLOCK_M
    column = tile + tl.arange(0, half)
    row = first_row + tl.arange(0, BLOCK_M)
    take_turn(DEPENDENT)
    if PARTS:
        found = row_squares(squares, row, row < M, M, parts, PARTS)  # asked for before the product
    gate = tl.zeros((half, BLOCK_M), tl.float32)
    up = tl.zeros((half, BLOCK_M), tl.float32)
    for k in range(0, K, BLOCK_K):
        gates = weight.load([tile, k])
        ups = weight.load([WIDTH + tile, k])
        rows = x.load([first_row, k])
        gate = tl.dot(gates, rows.T, gate, input_precision=PRECISION)
        up = tl.dot(ups, rows.T, up, input_precision=PRECISION)
    let_next_in_late(DEPENDENT)
    inside = column < WIDTH  # rows past the gate's are those of the other half
    if PARTS:
        factor = norm_scale(found, K, eps)
        gate *= factor[None, :]
        up *= factor[None, :]
    if BIAS:
        gate += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias + WIDTH + column, mask=inside, other=0.0).to(tl.float32)[:, None]
    if ROUNDED:
        gate = gate.to(out.dtype.element_ty).to(tl.float32)
        up = up.to(out.dtype.element_ty).to(tl.float32)
    if LIMITED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    value = gate / (1.0 + tl.exp(-gate)) * up
    place = row[None, :].to(tl.int64) * WIDTH + column[:, None]
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside[:, None] & (row < M)[None, :])


def describable(tensor: torch.Tensor) -> bool:
    """Whether the copy engine can read ``[rows, columns]``: dense rows that begin at multiples of 16 bytes."""
    size = tensor.element_size()
    return tensor.stride(1) == 1 and tensor.stride(0) * size % 16 == 0 and tensor.data_ptr() % 16 == 0


def described(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of a ``[R, C]`` tensor, read by blocks of rows and columns."""
    return TensorDescriptor(tensor, list(tensor.shape), [tensor.stride(0), 1], [rows, columns])


def launch_described(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tile: Any,
    arrived: torch.Tensor,
    partial: torch.Tensor,
    ending: Ending,
    *,
    length: int,
) -> None:
    """As :func:`~.few_rows.launch`, which calls it for tiles with ``described``."""
    columns, inner = weight.shape
    common: dict[str, Any] = {
        "BLOCK_N": tile.block_n,
        "BLOCK_M": tile.block_m,
        "BLOCK_K": tile.block_k,
        "BIAS": ending.bias is not None,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **ending.options,
    }
    some = out if ending.bias is None else ending.bias
    rows = described(x, tile.block_m, tile.block_k)
    grid = (triton.cdiv(columns, tile.block_n), tile.splits, triton.cdiv(x.shape[0], tile.block_m))
    run = starter(
        described_gated_kernel if ending.gated else described_rows_kernel, grid, compile_only=ending.compile_only
    )
    if ending.gated:
        halves = described(weight, tile.block_n // 2, tile.block_k)
        width = columns // 2
        run(
            rows, halves, some, out, x.shape[0], width, inner, ending.clamp, *ending.normed[2:],
            PARTS=ending.flags["PARTS"], LIMITED=ending.limit is not None, ROUNDED=ending.rounded, **common,
        )  # fmt: skip
    else:
        whole = described(weight, tile.block_n, tile.block_k)
        split = tile.splits > 1
        run(
            rows, whole, some, out, partial, arrived, x.shape[0], columns, inner, tile.splits, length, *ending.normed,
            SPLIT=split, **ending.flags, **common,
        )  # fmt: skip
