"""``gemm.linear`` in float32 with weights packed once for the host's matrix kernels.

oneDNN multiplies by a weight that was reordered into its blocked layout; one packing serves every number of rows.
On a processor with 512-bit vectors this reads one row's weights at memory speed and multiplies many rows two to
three times faster than ``F.linear``. Where torch was built without oneDNN, the weight is kept transposed,
``[in, out]``, which reads faster than ``[out, in]`` for few rows.

A oneDNN call costs some 11 microseconds before it multiplies, more where its code has left the caches since the last
one: more than a small product takes in all. Small weights are therefore kept in both layouts, and steps of few rows
multiply by the transposed one. Larger ones are kept once; a single row may be multiplied by reading their blocks
another way (``columns.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import attrs
import torch

from deepinfer_core.api import BuildContext, LinearRequest

from .columns import Columns, Sums, blocks_of, largest
from .huge_pages import ask_for_huge_pages

PACKED_FOR_ROWS = 32
"""Rows that oneDNN chooses its layout for. From 8 on it is the same; for 1 it picks one that is slower for more."""

SMALL = 1 << 16
"""Elements of a weight that is kept twice."""

FEW = 12 * SMALL
"""Multiplications up to which a plain product by a small weight is done sooner."""


def has_onednn() -> bool:
    """True when torch can reorder float32 weights for oneDNN on this host."""
    return torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


@attrs.frozen
class PackedWeight:
    """``weight`` in oneDNN's blocked layout, or ``[in, out]``; ``bias [out]`` or None; float32.

    ``small [in, out]``: the same weight again, for up to ``few`` rows, or None. ``columns``: ``weight`` as a
    single row reads it, or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    small: torch.Tensor | None = None
    few: int = 0
    columns: Columns | None = None


Pack: TypeAlias = Callable[[torch.Tensor, "torch.Tensor | None"], PackedWeight]
Run: TypeAlias = Callable[[torch.Tensor, PackedWeight], torch.Tensor]


class PackedLinear:
    """``y = x @ W.T (+ bias)``, accumulated in float32."""

    def __init__(self, request: LinearRequest, context: BuildContext) -> None:
        self._shape = (request.out_features, request.in_features)
        self._pack, self.run = packing()

    # Chosen once, in __init__: ``[M, in_features]`` float32 -> ``[M, out_features]`` float32.
    run: Run

    def prepare(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> PackedWeight:
        """Stack ``[out_i, in_features]`` parts along the output and pack the result; no part is kept."""
        weight = stacked(weights, self._shape)
        return self._pack(weight, None if bias is None else bias.to("cpu", torch.float32))


def packing() -> tuple[Pack, Run]:
    """How this host packs ``weight [out, in]`` and bias, and multiplies ``[M, in]`` by what that returned."""
    if not has_onednn():
        return _transposed, _run_transposed
    blocked = Blocked()
    return blocked.pack, blocked.run


def stacked(weights: Sequence[torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
    """The parts as one float32 ``[out_features, in_features]`` on the host. Raises ValueError for another shape."""
    parts = [part.to("cpu", torch.float32) for part in weights]
    weight = parts[0] if len(parts) == 1 else torch.cat(parts)
    if tuple(weight.shape) != shape:
        raise ValueError(f"linear weight has shape {tuple(weight.shape)}; the request says {shape}")
    return weight


def _multiply() -> Any:
    """oneDNN's product without torch's wrapper in Python, which costs more than two microseconds a call."""
    operator = torch.ops.mkldnn._linear_pointwise.default
    return getattr(operator, "_op", operator)


class Blocked:
    """Weights in oneDNN's layout. What it keeps between calls serves one product at a time."""

    def __init__(self) -> None:
        self._multiply = _multiply()
        self._largest = largest()
        self._sums: dict[tuple[int, int], Sums] = {}

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
        small = 0 < weight.numel() <= SMALL and bias is None
        with torch.inference_mode():
            weight = weight.contiguous()
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
            transposed = weight.t().contiguous() if small else None
        if hasattr(torch.ops.mkldnn, "data_ptr"):
            ask_for_huge_pages(torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed), used=True)
        return PackedWeight(
            packed,
            bias,
            transposed,
            FEW // weight.numel() if small else 0,
            self._columns(packed, weight) if SMALL < weight.numel() <= self._largest else None,
        )

    def _columns(self, packed: torch.Tensor, weight: torch.Tensor) -> Columns | None:
        vectors, (out, inp) = blocks_of(packed, weight), weight.shape
        if vectors is None:
            return None
        sums = self._sums.get((out, inp))
        if sums is None:
            sums = self._sums[out, inp] = Sums.of(out, inp)
        return Columns(vectors, sums)

    def run(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """``[M, in]`` float32 -> fresh ``[M, out]``."""
        result: torch.Tensor
        rows = x.shape[0]
        if weight.small is not None and rows <= weight.few:
            return torch.mm(x, weight.small)
        if rows == 1 and weight.columns is not None:
            result = weight.columns.product(x)
            return result if weight.bias is None else result.add_(weight.bias)
        result = self._multiply(x, weight.weight, weight.bias, "none", [], "")
        return result


def _transposed(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
    with torch.inference_mode():
        return PackedWeight(weight.t().contiguous(), bias)


def _run_transposed(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    return x @ weight.weight if weight.bias is None else torch.addmm(weight.bias, x, weight.weight)
