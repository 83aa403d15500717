"""``pointwise.rms_norm``: one pass, statistics in float32, the residual added on the way.

Floor: bytes. ``run`` reads and writes each row once, 2·M·H elements; ``add`` reads two and writes two, 4·M·H.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_core.api import BuildContext, RmsNormRequest

from .dependent import dependent, let_next_in, wait_turn
from .shapes import heads_view, power_of_two

TILE = 4096
"""Elements of one program, where rows are short enough to share one."""


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    x,
    residual,
    weight,
    out,
    rows,
    inner,
    stride_a,
    stride_b,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """ROWS rows a program. Row r of x lies at ``(r // inner) * stride_a + (r % inner) * stride_b``."""
    let_next_in(DEPENDENT)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)  # no kernel writes it
    wait_turn(DEPENDENT)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    dense = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    start = (row // inner).to(tl.int64) * stride_a + (row % inner).to(tl.int64) * stride_b
    value = tl.load(x + start[:, None] + column[None, :], mask=mask, other=0.0)
    if ADD:
        other = tl.load(residual + dense, mask=mask, other=0.0)
        total = (value.to(tl.float32) + other.to(tl.float32)).to(out.dtype.element_ty)
        tl.store(residual + dense, total, mask=mask)
        wide = total.to(tl.float32)
    else:
        wide = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=1) / WIDTH + eps)
    normed = wide * scale[:, None] * factor[None, :]
    tl.store(out + dense, normed.to(out.dtype.element_ty), mask=mask)


def launch_shape(width: int) -> tuple[int, int, int]:
    """(BLOCK, ROWS, warps): rows of a tile shrink as they grow longer, so that a program holds about 16 KB."""
    block = power_of_two(width)
    rows = max(1, min(16, TILE // block // 2))
    return block, rows, max(1, min(16, block * rows // 512))


class RmsNorm:
    """``w * x / sqrt(mean(x^2) + eps)``, rounded once, at the end."""

    def __init__(self, request: RmsNormRequest, context: BuildContext) -> None:
        self._eps = request.eps
        self._width = request.hidden
        self._block, self._rows, self._warps = launch_shape(request.hidden)

    def run(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]`` -> same shape and dtype, fresh memory."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._launch(heads_view(x), out, weight, out, False)
        return out

    def add(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(s), s)`` with ``s = x + residual``, which overwrites ``residual``."""
        residual = residual.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._launch(heads_view(x), residual, weight, out, True)
        return out, residual

    def _launch(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, add: bool
    ) -> None:
        rows = x.shape[0] * x.shape[1]
        if rows == 0:
            return
        norm_kernel[(triton.cdiv(rows, self._rows),)](
            x,
            residual,
            weight,
            out,
            rows,
            x.shape[1],
            x.stride(0),
            x.stride(1),
            self._eps,
            WIDTH=self._width,
            BLOCK=self._block,
            ROWS=self._rows,
            ADD=add,
            num_warps=self._warps,
            **dependent(x),
        )
