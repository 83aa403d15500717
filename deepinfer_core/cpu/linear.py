"""``gemm.linear`` in float32 with weights packed once for the host's matrix kernels.

oneDNN multiplies by a weight that was reordered into its blocked layout; one packing serves every number of rows.
On a processor with 512-bit vectors this reads one row's weights at memory speed and multiplies many rows two to
three times faster than ``F.linear``. Where torch was built without oneDNN, the weight is kept transposed,
``[in, out]``, which reads faster than ``[out, in]`` for few rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from deepinfer_core.api import BuildContext, LinearRequest

PACKED_FOR_ROWS = 32
"""Rows that oneDNN chooses its layout for. From 8 on it is the same; for 1 it picks one that is slower for more."""


def has_onednn() -> bool:
    """True when torch can reorder float32 weights for oneDNN on this host."""
    return torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


@attrs.frozen
class PackedWeight:
    """``weight`` in oneDNN's blocked layout, or ``[in, out]``; ``bias [out]`` or None; float32."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class PackedLinear:
    """``y = x @ W.T (+ bias)``, accumulated in float32."""

    def __init__(self, request: LinearRequest, context: BuildContext) -> None:
        self._shape = (request.out_features, request.in_features)
        self._pack, self.run = (_blocked, _run_blocked) if has_onednn() else (_transposed, _run_transposed)

    # Chosen once, in __init__: ``[M, in_features]`` float32 -> ``[M, out_features]`` float32.
    run: Callable[[torch.Tensor, PackedWeight], torch.Tensor]

    def prepare(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> PackedWeight:
        """Stack ``[out_i, in_features]`` parts along the output and pack the result; no part is kept."""
        weight = stacked(weights, self._shape)
        with torch.inference_mode():
            return PackedWeight(self._pack(weight), None if bias is None else bias.to("cpu", torch.float32))


def stacked(weights: Sequence[torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
    """The parts as one float32 ``[out_features, in_features]`` on the host. Raises ValueError for another shape."""
    parts = [part.to("cpu", torch.float32) for part in weights]
    weight = parts[0] if len(parts) == 1 else torch.cat(parts)
    if tuple(weight.shape) != shape:
        raise ValueError(f"linear weight has shape {tuple(weight.shape)}; the request says {shape}")
    return weight


def _blocked(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)
    return packed


_multiply: Any = torch.ops.mkldnn._linear_pointwise if has_onednn() else None


def _run_blocked(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    result: torch.Tensor = _multiply(x, weight.weight, weight.bias, "none", [], "")
    return result


def _transposed(weight: torch.Tensor) -> torch.Tensor:
    return weight.t().contiguous()


def _run_transposed(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    return x @ weight.weight if weight.bias is None else torch.addmm(weight.bias, x, weight.weight)
