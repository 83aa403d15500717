"""``pointwise.rms_norm`` by ``npu_rms_norm``.

Relied on (document ``npu_rms_norm``): the first result is ``x / sqrt(mean(x^2) + epsilon) * gamma`` over the last
dimension; x has 2 to 8 dimensions, is float16, bfloat16 or float32, and gamma has its dtype (both are widened where
they differ). The wheel has no document for ``npu_add_rms_norm``, in particular none that says whether the sum is
rounded before it is normed, so the sum is torch's own.
"""

from __future__ import annotations

import torch

from deepinfer_core.api import BuildContext, RmsNormRequest


class RmsNorm:
    """Root-mean-square norm over the last dimension."""

    def __init__(self, request: RmsNormRequest, context: BuildContext) -> None:
        self._eps = request.eps

    def run(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]`` -> same shape and dtype, fresh memory."""
        if not x.numel():
            return torch.empty_like(x, memory_format=torch.contiguous_format)
        wide = torch.promote_types(x.dtype, weight.dtype)  # never rounds the weight
        normed: torch.Tensor = torch.ops.npu.npu_rms_norm(x.to(wide), weight.to(wide), self._eps)[0]
        return normed.to(x.dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``s = x + residual`` -> ``(norm(s), s)``; ``residual`` is overwritten, as the contract allows."""
        total = residual.add_(x)
        return self.run(total, weight), total
