"""The end of a product: a finished tile is written, or what a gate makes of it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_tile(
    out, acc, bias, tile, row, row_mask, column, column_mask, N, limit,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, LIMITED: tl.constexpr,
    ROUNDED: tl.constexpr,
):  # fmt: skip
    """Write a finished tile of the product, or what the gate makes of it; ROUNDED: of the product as it is stored."""
    if BIAS:
        acc += tl.load(bias + column, mask=column_mask, other=0.0).to(tl.float32)[:, None]
    if GATED:
        half: tl.constexpr = BLOCK_N // 2
        if ROUNDED:
            acc = acc.to(out.dtype.element_ty).to(tl.float32)
        gate, up = tl.split(tl.permute(tl.reshape(acc, (half, 2, BLOCK_M)), (0, 2, 1)))
        if LIMITED:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
        value = gate / (1.0 + tl.exp(-gate)) * up
        width = N // 2
        pair = tile * half + tl.arange(0, half)
        place = row[None, :].to(tl.int64) * width + pair[:, None]
        tl.store(out + place, value.to(out.dtype.element_ty), mask=(pair < width)[:, None] & row_mask[None, :])
    else:
        place = row[None, :].to(tl.int64) * N + column[:, None]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=column_mask[:, None] & row_mask[None, :])
