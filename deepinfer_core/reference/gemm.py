"""``gemm.linear``: merged weight ``[out, in]`` in the compute dtype, product accumulated in float32 or float64."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from deepinfer_core.api import BuildContext, LinearRequest, QuantisedWeight, WeightPart

from .dtypes import dtype_named, widen
from .fp_formats import dequantise
from .quantise import round_groups


@attrs.frozen
class PackedLinear:
    """``weight [out_features, in_features]`` and ``bias [out_features]`` or None, in the compute dtype."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class Linear:
    """``y = x @ W.T (+ bias)``; the bias is added before the result is rounded to ``out_dtype``."""

    def __init__(self, request: LinearRequest, context: BuildContext) -> None:
        self._dtype = dtype_named(request.dtype)
        self._out_dtype = dtype_named(request.out_dtype)
        self._shape = (request.out_features, request.in_features)
        self._device = context.device
        format, _, group = request.activations.rpartition(":")
        self._rounding = (format, int(group)) if format else None

    def prepare(self, weights: Sequence[WeightPart], bias: torch.Tensor | None = None) -> PackedLinear:
        """Stack ``[out_i, in_features]`` parts along the output; a single part already in place is used as it is."""
        weight = stacked(weights, self._device, self._dtype)
        if tuple(weight.shape) != self._shape:
            raise ValueError(f"linear weight has shape {tuple(weight.shape)}; the request says {self._shape}")
        return PackedLinear(weight, None if bias is None else bias.to(device=self._device, dtype=self._dtype))

    def run(self, x: torch.Tensor, weight: PackedLinear) -> torch.Tensor:
        """``[M, in_features]`` -> ``[M, out_features]`` in ``out_dtype``."""
        bias = None if weight.bias is None else widen(weight.bias)
        rows = widen(x)
        if self._rounding is not None:
            format, group = self._rounding
            padded = torch.nn.functional.pad(rows.to(torch.float32), (0, -rows.shape[1] % group))
            rows = round_groups(padded, format, group)[:, : rows.shape[1]].to(rows.dtype)
        return torch.nn.functional.linear(rows, widen(weight.weight), bias).to(self._out_dtype)


def stacked(parts: Sequence[WeightPart], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The parts as one plain weight, packed ones decoded."""
    plain = [
        dequantise(part, dtype).to(device) if isinstance(part, QuantisedWeight) else part.to(device=device, dtype=dtype)
        for part in parts
    ]
    return plain[0] if len(plain) == 1 else torch.cat(plain)
