"""``pointwise.hyper_connection``: the merge by ``npu_mhc_post``, the mix by the reference.

Relied on (document ``npu_mhc_post``): ``x' = h_res^T x + h_out (outer) h_post`` for x ``[T, n, D]``, h_out ``[T, D]``
in float16 or bfloat16, h_res ``[T, n, n]`` and h_post ``[T, n]`` float32; the 950 is named among its devices.

``npu_mhc_pre`` would do the mix, but its document gives no formula for ``h_post`` and says that ``h_res`` comes before
the Sinkhorn iteration without saying in which scale: the reference mixes until somebody compares them on a device.
:mod:`.hyper_mix` does it by own kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_core.api import BuildContext, HyperConnectionRequest


class HyperConnection:
    """One sub-layer's connection to the streams."""

    def __init__(self, request: HyperConnectionRequest, context: BuildContext) -> None:
        self._reference = context.reference(request)

    def prepare(self, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor) -> Any:
        """As the reference keeps them."""
        return self._reference.prepare(fn, base, scale)

    def mix(self, streams: torch.Tensor, weight: Any) -> tuple[torch.Tensor, Any]:
        """``[T, M, hidden]`` -> ``[T, hidden]``, and ``post [T, M]`` with ``C [T, M, M]``."""
        mixed: tuple[torch.Tensor, Any] = self._reference.mix(streams, weight)
        return mixed

    def merge(self, streams: torch.Tensor, output: torch.Tensor, mixed: Any) -> torch.Tensor:
        """``h'_k = post_k * output + sum_j C_jk h_j``, ``[T, M, hidden]``."""
        return merge(streams, output, mixed)


def merge(streams: torch.Tensor, output: torch.Tensor, mixed: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """``mixed``: ``post [T, M]`` and ``C [T, M, M]``."""
    if not len(streams):
        return torch.empty_like(streams)
    post, kept = mixed
    merged: torch.Tensor = torch.ops.npu.npu_mhc_post(
        streams.contiguous(), kept.to(torch.float32), output.contiguous(), post.to(torch.float32)
    )
    return merged
