"""``gemm.grouped`` by ``npu_grouped_matmul``.

Relied on (its document): one x ``[N, in]`` and one weight ``[groups, in, out]`` with ``split_item=3`` give one
``[N, out]``; ``group_type=0`` groups rows; ``group_list`` int64 of one entry a group holds running totals
(``group_list_type=0``), which may repeat where a group is empty. float16, bfloat16 and float32, output of the dtype
of x; inner dimensions below 65,536.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer_core.api import BuildContext, GroupedLinearRequest

from .linear import stacked

SINGLE_OUTPUT = 3
BY_ROWS = 0
RUNNING_TOTALS = 0


class GroupedLinear:
    """``y[i] = x[i] @ W[group of i].T``."""

    def __init__(self, request: GroupedLinearRequest, context: BuildContext) -> None:
        self._request = request
        self._context = context

    def prepare(self, weights: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """``groups`` lists of parts, each stacking to ``[out_features, in_features]`` -> ``[groups, in, out]``."""
        r = self._request
        if len(weights) != r.groups:
            raise ValueError(f"{len(weights)} groups of weights; the request says {r.groups}")
        packed = torch.empty(
            (r.groups, r.in_features, r.out_features), dtype=getattr(torch, r.dtype), device=self._context.device
        )
        for group, parts in enumerate(weights):
            packed[group] = stacked(parts, self._context, r.dtype).T
        return packed

    def run(self, x: torch.Tensor, offsets: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``[N, in_features]`` sorted by group -> ``[N, out_features]``."""
        if not len(x):
            return x.new_empty((0, self._request.out_features))
        output: torch.Tensor = torch.ops.npu.npu_grouped_matmul(
            [x.contiguous()],
            [weight],
            group_list=offsets[1:].contiguous(),
            split_item=SINGLE_OUTPUT,
            group_type=BY_ROWS,
            group_list_type=RUNNING_TOTALS,
        )[0]
        return output
