"""``gemm.linear`` with weights kept in 8 bits: a quarter of the memory, and faster, but not float32-exact.

Weights are rounded once to whole steps of their output channel's largest magnitude over 127. Every row of x is
rounded likewise when it comes, on its own, so that rows stay independent of each other bit by bit: sums of whole
numbers do not depend on their order. Used only where the ``ops`` setting asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch

from deepinfer_core.api import BuildContext, ConfigError, LinearRequest

from .linear import PACKED_FOR_ROWS, has_onednn, stacked

STEPS = 127
ZERO = 128
"""x is stored unsigned: oneDNN's kernels for signed x are slow ones."""

_TINY = np.float32(1e-30)  # a row of zeros stays one


@attrs.frozen
class Int8Weight:
    """``weight`` int8 in oneDNN's layout, its ``scale [out]`` float32, zero points, and ``bias [out]`` or None."""

    weight: torch.Tensor
    scale: torch.Tensor
    zeros: torch.Tensor
    bias: torch.Tensor | None


class Int8Linear:
    """``y = x @ W.T (+ bias)`` with both factors rounded to 8 bits, accumulated in 32-bit integers."""

    def __init__(self, request: LinearRequest, context: BuildContext) -> None:
        self._shape = (request.out_features, request.in_features)
        if not can_multiply_bytes():
            raise ConfigError(
                "ops: 'cpu:int8_linear' needs oneDNN and a processor with instructions for products of bytes (VNNI), "
                "without which sums overflow; take it out of 'gemm.linear'"
            )

    def prepare(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> Int8Weight:
        """Stack ``[out_i, in_features]`` parts along the output, round and pack them; no part is kept."""
        weight = stacked(weights, self._shape)
        with torch.inference_mode():
            scale = weight.abs().amax(dim=1).clamp_(min=float(_TINY)).div_(STEPS)
            rounded = (weight / scale[:, None]).round_().to(torch.int8)
            return Int8Weight(
                weight=torch.ops.onednn.qlinear_prepack(rounded, [PACKED_FOR_ROWS, self._shape[1]]),
                scale=scale,
                zeros=torch.zeros(self._shape[0], dtype=torch.int32),
                bias=None if bias is None else bias.to("cpu", torch.float32),
            )

    def run(self, x: torch.Tensor, weight: Int8Weight) -> torch.Tensor:
        """``[M, in_features]`` float32 -> ``[M, out_features]`` float32."""
        if len(x) == 0:
            return torch.empty(0, self._shape[0])
        rounded, largest = _round_rows(x)
        result: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            rounded,
            1 / STEPS,
            ZERO,
            weight.weight,
            weight.scale,
            weight.zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        result.mul_(largest)
        return result if weight.bias is None else result.add_(weight.bias)


def _round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 ``[M, K]`` around ZERO in steps of a row's largest magnitude over STEPS, and that magnitude ``[M, 1]``.

    A row with a NaN gets NaN as its magnitude, and so as its result.
    """
    rows = x.numpy()
    largest = np.maximum(np.abs(rows).max(axis=1, keepdims=True), _TINY)
    with np.errstate(invalid="ignore"):
        steps = np.rint(rows * (np.float32(STEPS) / largest))
        steps += ZERO
        return torch.from_numpy(steps.astype(np.uint8)), torch.from_numpy(largest)


def can_multiply_bytes() -> bool:
    """True when this host sums products of bytes without overflow, and torch's kernels for it are there."""
    facts: Any = getattr(torch.cpu, "get_capabilities", dict)()
    vnni = facts.get("avx512_vnni") or facts.get("avx_vnni")
    return bool(vnni) and has_onednn() and hasattr(torch.ops.onednn, "qlinear_prepack")
