"""An FP8 weight in the compute type, scales included: what many rows that stay as they are get multiplied with.

Floor: bytes, N·K read and 2·N·K written. Beside a product of some hundred rows or more that is a few per cent.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .dependent import dependent, take_turn
from .fp8_weight import Fp8Weight

ROWS = 32


@triton.jit
def widen_kernel(data, scale, out, N, K, ROWS: tl.constexpr, SCALE_ROWS: tl.constexpr, DEPENDENT: tl.constexpr):
    """Grid (K / 128, ceil(N / ROWS)). ``data [N, K]`` e4m3, ``scale [ceil(N / SCALE_ROWS), K / 128]`` float32."""
    take_turn(DEPENDENT)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = row < N
    place = row.to(tl.int64)[:, None] * K + (tl.program_id(0) * 128 + tl.arange(0, 128))[None, :]
    factor = tl.load(scale + row // SCALE_ROWS * (K // 128) + tl.program_id(0), mask=live, other=0.0)
    values = tl.load(data + place, mask=live[:, None], other=0.0).to(tl.float32) * factor[:, None]
    tl.store(out + place, values.to(out.dtype.element_ty), mask=live[:, None])


def widen(weight: Fp8Weight, dtype: torch.dtype) -> torch.Tensor:
    """``[out, in]`` in ``dtype``, fresh memory."""
    rows, inner = weight.data.shape
    out = torch.empty((rows, inner), dtype=dtype, device=weight.data.device)
    kernel: Any = widen_kernel
    kernel[(inner // 128, triton.cdiv(rows, ROWS))](
        weight.data,
        weight.scale,
        out,
        rows,
        inner,
        ROWS=ROWS,
        SCALE_ROWS=weight.rows,
        num_warps=4,
        **dependent(out),
    )
    return out
