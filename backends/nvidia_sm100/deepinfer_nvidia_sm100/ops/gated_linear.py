"""``fused.gated_linear``: few rows in one kernel (:mod:`.few_rows`), many as cuBLAS's product and the activation.

Floor: bytes of the weight, 4·width·K in 16 bits; with its parts a row writes and reads 2·width elements more, and a
kernel of two microseconds more is started. With many rows the activation's own bytes are what is left to gain, and
cuBLAS is faster at the product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from deepinfer_core.api import BuildContext, GatedLinearRequest, WeightPart

from .few_rows import AnyTile, launch
from .linear import Linear, PackedWeight, few_tiles
from .swiglu import Swiglu


class Product(Protocol):
    """A linear layer with the counters that kernels in its place use."""

    @property
    def arrived(self) -> torch.Tensor: ...

    def prepare(self, weights: Sequence[WeightPart], bias: torch.Tensor | None = None) -> PackedWeight: ...

    def run(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor: ...


class Gated:
    """``silu(x @ G.T) * (x @ U.T)`` of a weight that holds G, then U.

    ``linear``: the product of many rows. ``tiles``: for numbers of rows at which one kernel does both; with ``rounded``
    it rounds the product first, as the two kernels of many rows write and read it.
    """

    def __init__(
        self,
        request: GatedLinearRequest,
        context: BuildContext,
        linear: Product,
        tiles: Mapping[int, AnyTile | None],
        rounded: bool = False,
    ) -> None:
        self._linear = linear
        self._tiles = tiles
        self._rounded = rounded
        self._swiglu = Swiglu(request.swiglu, context)
        self._width = request.width
        self._limit = request.limit

    @property
    def arrived(self) -> torch.Tensor:
        """Zeros that the kernel counts with, for what runs in this operator's place."""
        return self._linear.arrived

    def prepare(self, weights: Sequence[WeightPart], bias: torch.Tensor | None = None) -> PackedWeight:
        """On the device, in the compute dtype."""
        return self._linear.prepare(weights, bias)

    def run(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """``[M, in_features]`` -> ``[M, width]``, fresh memory."""
        tile = self._tiles.get(x.shape[0])
        if tile is None:
            return self._swiglu.run(self._linear.run(x, weight))
        out = torch.empty((x.shape[0], self._width), dtype=x.dtype, device=x.device)
        if out.numel():
            x = x if x.stride(-1) == 1 else x.contiguous()
            launch(
                x,
                weight.weight,
                weight.bias,
                out,
                tile,
                self._linear.arrived,
                gated=True,
                limit=self._limit,
                rounded=self._rounded,
            )
        return out


class GatedLinear(Gated):
    """With the tiles measured, or thought, to be the fastest."""

    def __init__(self, request: GatedLinearRequest, context: BuildContext) -> None:
        tiles = few_tiles(request.linear, context, "gated_linear")
        super().__init__(request, context, Linear(request.linear, context), tiles)
