"""``gemm.linear`` of rounded rows with FP8 weights by DeepGEMM, where it is installed.

It takes many rows; few rows, and all of them where its trial fails, are multiplied as in :mod:`.fp8_linear`. It
compiles a kernel for each weight shape and choice of tile, at load those of up to ``max_tokens`` rows, and keeps them
on disk.

Floor: as in :mod:`.fp8_many_rows`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from deepinfer_core.api import BuildContext, LinearRequest, WeightPart
from deepinfer_nvidia_sm100 import deep_gemm_probe

from .fp8_hopper import HopperTile
from .fp8_linear import RoundedFp8Linear
from .fp8_many_rows import ManyTile
from .fp8_weight import Fp8Weight

RECIPE = (1, 128, 128)
"""Rows of x, and rows and columns of the weight, that share a scale."""

ROWS = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Numbers of rows whose kernels are compiled at load."""


class DeepGemmLinear(RoundedFp8Linear):
    """``y = x @ W.T (+ bias)``, rows rounded to FP8 in groups of 128."""

    def __init__(self, request: LinearRequest, context: BuildContext) -> None:
        super().__init__(request, context)
        self._uncompiled = tuple(rows for rows in ROWS if rows <= context.max_tokens)
        self._library: Any = None
        reason = deep_gemm_probe.failure()
        if reason:
            warnings.warn(f"DeepGEMM is not used: {reason}", RuntimeWarning, stacklevel=2)
        else:
            import deep_gemm

            self._library = deep_gemm

    def prepare(self, weights: Sequence[WeightPart], bias: torch.Tensor | None = None) -> Fp8Weight:
        """On the device, as stored; compiles what its products need."""
        packed = super().prepare(weights, bias)
        if self._library is not None:
            for rows in self._uncompiled:
                x = torch.zeros((rows, self._request.in_features), dtype=torch.bfloat16, device=self._device)
                self.run(x, packed)
            self._uncompiled = ()
        return packed

    def _many(
        self,
        x: torch.Tensor,
        x_scale: torch.Tensor,
        weight: Fp8Weight,
        out: torch.Tensor,
        tile: ManyTile | HopperTile,
    ) -> None:
        if self._library is None or weight.rows != RECIPE[1]:
            super()._many(x, x_scale, weight, out, tile)
            return
        # The scales of rows lie as it wants them: rows side by side, groups a multiple of 16 bytes apart.
        self._library.fp8_gemm_nt((x, x_scale.t()), (weight.data, weight.scale), out, recipe=RECIPE)
        if weight.bias is not None:
            out.add_(weight.bias)
