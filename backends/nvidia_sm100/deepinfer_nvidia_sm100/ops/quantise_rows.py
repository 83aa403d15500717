"""Rows to FP8 with one power-of-two scale for 128 neighbours of a row, as ``pointwise.quantise_dequantise`` rounds.

Floor: bytes, 2·M·K read and M·K written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .dependent import dependent, take_turn
from .starting import starter

TOGETHER = 16
"""Rows and groups of a program, multiplied."""


@triton.jit(do_not_specialize=["M", "scale_stride"])
def quantise_rows_kernel(
    x,
    out,
    scale,
    M,
    K,
    x_stride,
    scale_stride,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (ceil(M / ROWS), ceil(K / 128 / GROUPS)). ``x [M, K]``, ``out [M, K]`` e4m3, ``scale [K / 128, M]``.

    ``scale = 2^ceil(log2(a / 448))`` with a the largest magnitude of the group, at least 1e-4; NaN if there is one.
    """
    take_turn(DEPENDENT)
    index = tl.arange(0, ROWS * GROUPS)
    row = tl.program_id(0) * ROWS + index % ROWS
    group = tl.program_id(1) * GROUPS + index // ROWS
    live = (row < M) & (group < K // 128)
    channel = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    values = tl.load(x + row.to(tl.int64)[:, None] * x_stride + channel, mask=live[:, None], other=0.0).to(tl.float32)
    magnitude = tl.abs(values)
    largest = tl.maximum(tl.max(magnitude, axis=1), 1e-4) / 448.0
    bits = largest.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
    factor = (exponent << 23).to(tl.float32, bitcast=True)
    # What is divided by a power of two is exact, and so is the product with its inverse.
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    nan = tl.sum(tl.where(magnitude == magnitude, 0, 1), axis=1) > 0
    codes = tl.clamp(values * inverse[:, None], -448.0, 448.0)
    place = row.to(tl.int64)[:, None] * K + channel
    tl.store(out + place, codes.to(tl.float8e4nv), mask=live[:, None])
    factor = tl.where(nan, float("nan"), factor)
    tl.store(scale + group.to(tl.int64) * scale_stride + row, factor, mask=live)


def quantise_rows(x: torch.Tensor, *, compile_only: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """``[M, K]`` -> e4m3 ``[M, K]`` and float32 ``[K / 128, M]``, whose rows lie a multiple of 16 bytes apart.

    K is a multiple of 128.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, inner = x.shape
    out = torch.empty((rows, inner), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((inner // 128, -(-rows // 4) * 4), dtype=torch.float32, device=x.device)[:, :rows]
    # Few rows: many programs of few groups each. Many: neighbours in memory of the scales lie in one program.
    together = 1 if rows < 16 else TOGETHER
    groups = 2 if rows < 16 else 1
    grid = (triton.cdiv(rows, together), triton.cdiv(inner // 128, groups))
    if rows:
        starter(quantise_rows_kernel, grid, compile_only=compile_only)(
            x,
            out,
            scale,
            rows,
            inner,
            x.stride(0),
            scale.stride(0),
            ROWS=together,
            GROUPS=groups,
            num_warps=1 if rows < 16 else 4,
            **dependent(x),
        )
    return out, scale
