"""``gemm.batched`` and ``gemm.grouped`` in float32.

Experts are packed one by one as linear layers are, and only those that have rows are multiplied by.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer_core.api import BatchedLinearRequest, BuildContext, GroupedLinearRequest

from .linear import PackedWeight, packing, stacked


class BatchedLinear:
    """``y[:, g] = x[:, g] @ W[g].T``."""

    def __init__(self, request: BatchedLinearRequest, context: BuildContext) -> None:
        self._request = request

    def prepare(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """Parts that stack to ``[groups * out_features, in_features]`` -> ``[groups, in_features, out_features]``."""
        r = self._request
        weight = stacked(weights, (r.groups * r.out_features, r.in_features))
        return weight.view(r.groups, r.out_features, r.in_features).transpose(1, 2).contiguous()

    def run(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``[M, groups, in_features]`` float32 -> ``[M, groups, out_features]``."""
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


class GroupedLinear:
    """``y[i] = x[i] @ W[group of i].T``, one product for each group that has rows."""

    def __init__(self, request: GroupedLinearRequest, context: BuildContext) -> None:
        self._request = request
        self._pack, self._multiply = packing()

    def prepare(self, weights: Sequence[Sequence[torch.Tensor]]) -> list[PackedWeight]:
        """One list of parts a group, each stacking to ``[out_features, in_features]``."""
        r = self._request
        if len(weights) != r.groups:
            raise ValueError(f"{len(weights)} groups of weights; the request says {r.groups}")
        return [self._pack(stacked(parts, (r.out_features, r.in_features)), None) for parts in weights]

    def run(self, x: torch.Tensor, offsets: torch.Tensor, weight: list[PackedWeight]) -> torch.Tensor:
        """``[N, in_features]`` float32 sorted by group -> ``[N, out_features]``."""
        bounds = offsets.numpy()
        counts = bounds[1:] - bounds[:-1]
        (busy,) = counts.nonzero()
        if not len(busy):
            return x.new_empty((0, self._request.out_features))
        parts = x.split_with_sizes(counts[busy].tolist())
        products = [self._multiply(part, weight[group]) for part, group in zip(parts, busy.tolist(), strict=True)]
        return products[0] if len(products) == 1 else torch.cat(products)
