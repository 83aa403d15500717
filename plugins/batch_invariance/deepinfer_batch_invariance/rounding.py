"""Quantise-dequantise on any device. Everything but the Hadamard product is exact for each element on its own."""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_core.api import BuildContext, QuantiseDequantiseRequest

from .self_check import random_row, steady_counts, threads
from .tiles import COUNTS, Tiles


class QuantiseDequantise:
    """The reference operator; with a Hadamard product, over tiles of rows."""

    def __init__(self, request: QuantiseDequantiseRequest, context: BuildContext) -> None:
        self._reference: Any = context.reference(request)
        self._tiles: Tiles | None = None
        if request.hadamard:
            row = random_row(request.width, dtype=getattr(torch, request.dtype), device=context.device)
            with threads(context.num_threads):
                what = f"Hadamard product of {request.width} channels"
                self._tiles = Tiles(steady_counts(self._reference.run, row, COUNTS, what))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., width]`` -> same shape and dtype."""
        if self._tiles is None:
            exact: torch.Tensor = self._reference.run(x)
            return exact
        return self._tiles.run(self._reference.run, x.reshape(-1, x.shape[-1])).view(x.shape)
