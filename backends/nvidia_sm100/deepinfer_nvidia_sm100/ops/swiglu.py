"""``pointwise.swiglu``: ``silu(gate) * up``, in float32, rounded once.

Floor: bytes, 3·M·width elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_core.api import BuildContext, SwigluRequest

from .dependent import dependent, take_turn

BLOCK = 1024


@triton.jit
def swiglu_kernel(
    gate_up,
    out,
    limit,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LIMITED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    take_turn(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate = tl.load(gate_up + row * (2 * WIDTH) + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    if LIMITED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=mask)


class Swiglu:
    """Gated activation, with the clamp before it where the request has one."""

    def __init__(self, request: SwigluRequest, context: BuildContext) -> None:
        self._limit = request.limit

    def run(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``[M, 2*width]`` (gate first) -> ``[M, width]``, same dtype, fresh memory."""
        return activate(gate_up, self._limit)


def activate(gate_up: torch.Tensor, limit: float | None) -> torch.Tensor:
    """The operator's work, clamped at ``limit`` if there is one."""
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        swiglu_kernel[(rows, triton.cdiv(width, BLOCK))](
            gate_up,
            out,
            0.0 if limit is None else limit,
            WIDTH=width,
            BLOCK=BLOCK,
            LIMITED=limit is not None,
            num_warps=4,
            **dependent(out),
        )
    return out
