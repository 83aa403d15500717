"""The one operator that is replaced: ``pointwise.rms_norm``, by torch's fused kernel."""

from __future__ import annotations

import torch

from deepinfer_core.api import BuildContext, RmsNormRequest


class FusedNorm:
    """``w * x / sqrt(mean(x^2) + eps)`` over the last dimension, float32."""

    def __init__(self, request: RmsNormRequest, context: BuildContext) -> None:
        self._shape = (request.hidden,)
        self._eps = request.eps

    def run(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]`` -> same shape, fresh memory."""
        return torch.nn.functional.rms_norm(x, self._shape, weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``s = x + residual`` -> ``(norm(s), s)``; ``residual`` is overwritten, as the contract allows."""
        total = residual.add_(x)
        return self.run(total, weight), total
