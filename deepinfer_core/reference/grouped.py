"""``gemm.batched`` and ``gemm.grouped``: several weights behind one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer_core.api import (
    BatchedLinearRequest,
    BuildContext,
    GroupedLinearRequest,
    QuantisedWeight,
    WeightPart,
)

from .dtypes import dtype_named, widen
from .gemm import stacked


class BatchedLinear:
    """``y[:, g] = x[:, g] @ W[g].T``."""

    def __init__(self, request: BatchedLinearRequest, context: BuildContext) -> None:
        self._request = request
        self._dtype = dtype_named(request.dtype)
        self._out_dtype = dtype_named(request.out_dtype)
        self._device = context.device

    def prepare(self, weights: Sequence[WeightPart]) -> torch.Tensor:
        """Parts that stack to ``[groups * out_features, in_features]`` -> ``[groups, out_features, in_features]``."""
        r = self._request
        weight = stacked(weights, self._device, self._dtype)
        if tuple(weight.shape) != (r.groups * r.out_features, r.in_features):
            raise ValueError(
                f"batched weight has shape {tuple(weight.shape)}; the request says "
                f"{(r.groups * r.out_features, r.in_features)}"
            )
        return weight.view(r.groups, r.out_features, r.in_features)

    def run(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``[M, groups, in_features]`` -> ``[M, groups, out_features]``."""
        product = torch.bmm(widen(x).transpose(0, 1), widen(weight).transpose(1, 2))
        return product.transpose(0, 1).to(self._out_dtype)


class GroupedLinear:
    """``y[i] = x[i] @ W[group of i].T``.

    Packed weights stay as they are, memory-mapped ones included, and are decoded one group at a time when rows
    need them: the experts of a large layer would not fit otherwise.
    """

    def __init__(self, request: GroupedLinearRequest, context: BuildContext) -> None:
        self._request = request
        self._dtype = dtype_named(request.dtype)
        self._out_dtype = dtype_named(request.out_dtype)
        self._device = context.device

    def prepare(self, weights: Sequence[Sequence[WeightPart]]) -> list[list[WeightPart]]:
        """One list of parts a group, each stacking to ``[out_features, in_features]``."""
        r = self._request
        if len(weights) != r.groups:
            raise ValueError(f"{len(weights)} groups of weights; the request says {r.groups}")
        for group, parts in enumerate(weights):
            shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
            if shape != (r.out_features, r.in_features):
                raise ValueError(
                    f"group {group}: weight has shape {shape}; the request says {(r.out_features, r.in_features)}"
                )
        return [self._kept(parts) for parts in weights]

    def run(self, x: torch.Tensor, offsets: torch.Tensor, weight: list[list[WeightPart]]) -> torch.Tensor:
        """``[N, in_features]`` sorted by group -> ``[N, out_features]``; groups without rows cost nothing."""
        output = torch.empty((x.shape[0], self._request.out_features), dtype=self._out_dtype, device=x.device)
        bounds = offsets.tolist()
        for group, parts in enumerate(weight):
            start, end = bounds[group], bounds[group + 1]
            if start < end:
                matrix = stacked(parts, self._device, self._dtype)
                output[start:end] = torch.nn.functional.linear(widen(x[start:end]), widen(matrix)).to(self._out_dtype)
        return output

    def _kept(self, parts: Sequence[WeightPart]) -> list[WeightPart]:
        if any(isinstance(part, QuantisedWeight) for part in parts):
            return list(parts)
        return [stacked(parts, self._device, self._dtype)]
