"""``pointwise.swiglu`` by ``npu_swiglu``, and by ``npu_clipped_swiglu`` where a limit clamps.

Relied on: ``npu_swiglu(x, dim)`` is ``A * sigmoid(A) * B`` for the halves A, B of x (document ``npu_swiglu``);
``npu_clipped_swiglu`` with ``interleaved=False`` takes ``A.clamp(max=limit)`` and ``B.clamp(-limit, limit)`` and gives
``A * sigmoid(alpha * A) * (B + bias)`` (document ``npu_clipped_swiglu``), so alpha is 1 and bias 0 here. Both take
float16, bfloat16 and float32; the second wants contiguous input.
"""

from __future__ import annotations

import torch

from deepinfer_core.api import BuildContext, SwigluRequest


class Swiglu:
    """``silu(gate) * up`` with gate in the first half."""

    def __init__(self, request: SwigluRequest, context: BuildContext) -> None:
        self._request = request

    def run(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``[M, 2*width]`` -> ``[M, width]``, same dtype, fresh memory."""
        limit = self._request.limit
        if not gate_up.shape[0]:
            return gate_up.new_empty((0, self._request.width))
        result: torch.Tensor
        if limit is None:
            result = torch.ops.npu.npu_swiglu(gate_up, -1)
        else:
            result = torch.ops.npu.npu_clipped_swiglu(
                gate_up.contiguous(), dim=-1, alpha=1.0, limit=limit, bias=0.0, interleaved=False
            )
        return result
