"""``gemm.linear`` with weights kept in 8 bits: a quarter of the memory and faster for few rows, not float32-exact.

Weights are rounded once, to steps of each output channel's largest magnitude over 127. torch's kernel multiplies
them by x in bfloat16, sums in float32, scales, and rounds the result to bfloat16; a row's result does not depend on
the rows beside it. Used only where the ``ops`` setting asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from deepinfer_core.api import BuildContext, ConfigError, LinearRequest

from .linear import stacked

STEPS = 127
_TINY = 1e-30  # a channel of zeros stays one

_multiply: Any = getattr(torch.ops.aten, "_weight_int8pack_mm", None)


@attrs.frozen
class Int8Weight:
    """``weight [out, in]`` int8, ``scale [out]`` bfloat16, ``bias [out]`` float32 or None."""

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None


class Int8WeightOnly:
    """``y = x @ W.T (+ bias)`` with W rounded to 8 bits, x and the product to bfloat16."""

    def __init__(self, request: LinearRequest, context: BuildContext) -> None:
        self._shape = (request.out_features, request.in_features)
        if _multiply is None:
            raise ConfigError(
                f"ops: 'cpu:int8_weight_only': torch {torch.__version__} has no 8-bit weight kernel; "
                "take it out of 'gemm.linear'"
            )

    def prepare(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> Int8Weight:
        """Stack ``[out_i, in_features]`` parts along the output and round them; no part is kept."""
        weight = stacked(weights, self._shape)
        with torch.inference_mode():
            # Rounded to the scale that the kernel will multiply by, so that its own rounding costs nothing more.
            scale = weight.abs().amax(dim=1).clamp_(min=_TINY).div_(STEPS).to(torch.bfloat16)
            steps = (weight / scale.to(torch.float32)[:, None]).round_().clamp_(-STEPS - 1, STEPS)
            return Int8Weight(steps.to(torch.int8), scale, None if bias is None else bias.to("cpu", torch.float32))

    def run(self, x: torch.Tensor, weight: Int8Weight) -> torch.Tensor:
        """``[M, in_features]`` float32 -> ``[M, out_features]`` float32."""
        product = _multiply(x.to(torch.bfloat16).contiguous(), weight.weight, weight.scale)
        result: torch.Tensor = product.to(torch.float32)
        return result if weight.bias is None else result.add_(weight.bias)
