"""Quantise-dequantise on any device. Everything but the Hadamard product is exact for each element on its own."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from deepinfer_core.api import BuildContext, QuantiseDequantiseRequest

from .self_check import random_row
from .tiles import Tiles, steady_tiles


class QuantiseDequantise:
    """The reference operator; with a Hadamard product, over tiles of rows."""

    def __init__(self, request: QuantiseDequantiseRequest, context: BuildContext) -> None:
        self._reference: Any = context.reference(request)
        self._tiles: Tiles | None = None
        if request.hadamard:
            # The product alone, in float32: its sums are what is tried, and rounding would hide most of them.
            product = context.reference(attrs.evolve(request, channels=0, dtype="float32"))
            row = random_row(request.width, device=context.device)
            what = f"Hadamard product of {request.width} channels"
            self._tiles = steady_tiles(product.run, row, what, context.num_threads)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., width]`` -> same shape and dtype."""
        if self._tiles is None:
            exact: torch.Tensor = self._reference.run(x)
            return exact
        return self._tiles.run(self._reference.run, x.reshape(-1, x.shape[-1])).view(x.shape)
