"""``gemm.linear`` and ``gemm.batched`` by torch's own products, which torch_npu sends to the cube cores.

The cube accumulates 16-bit products in float32, as the contract asks. Weights stored in FP8 or FP4 are refused: the
quantised products of torch_npu round activations too, which the contract does not allow.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from deepinfer_core.api import BatchedLinearRequest, BuildContext, LinearRequest


@attrs.frozen(eq=False)
class _Weight:
    """``weight [out, in]`` and ``bias [out]`` or None, in the compute dtype, on the device."""

    weight: torch.Tensor
    bias: torch.Tensor | None


def stacked(parts: Sequence[torch.Tensor], context: BuildContext, dtype: str) -> torch.Tensor:
    """The parts as one weight on the device. The parts may be memory-mapped."""
    moved = [part.to(device=context.device, dtype=getattr(torch, dtype)) for part in parts]
    return moved[0] if len(moved) == 1 else torch.cat(moved)


class Linear:
    """``y = x @ W.T (+ bias)``."""

    def __init__(self, request: LinearRequest, context: BuildContext) -> None:
        self._request = request
        self._context = context

    def prepare(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> _Weight:
        """Stack ``[out_i, in_features]`` parts along the output."""
        r = self._request
        weight = stacked(weights, self._context, r.dtype)
        if tuple(weight.shape) != (r.out_features, r.in_features):
            raise ValueError(
                f"linear weight has shape {tuple(weight.shape)}; the request says {(r.out_features, r.in_features)}"
            )
        return _Weight(weight, None if bias is None else bias.to(weight))

    def run(self, x: torch.Tensor, weight: _Weight) -> torch.Tensor:
        """``[M, in_features]`` -> ``[M, out_features]``."""
        return torch.nn.functional.linear(x, weight.weight, weight.bias)


class BatchedLinear:
    """``y[:, g] = x[:, g] @ W[g].T``."""

    def __init__(self, request: BatchedLinearRequest, context: BuildContext) -> None:
        self._request = request
        self._context = context

    def prepare(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """Parts that stack to ``[groups * out_features, in_features]`` -> ``[groups, in_features, out_features]``."""
        r = self._request
        weight = stacked(weights, self._context, r.dtype)
        return weight.view(r.groups, r.out_features, r.in_features).transpose(1, 2).contiguous()

    def run(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``[M, groups, in_features]`` -> ``[M, groups, out_features]``."""
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1).contiguous()
