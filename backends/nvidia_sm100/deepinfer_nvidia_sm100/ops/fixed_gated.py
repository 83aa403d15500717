"""``fused.gated_linear`` whose rows have the same bits in any company: few rows in one kernel, many in two.

The kernel that does both rounds the product as the two would have written it, so that either gives a row the same bits.

Floor: as :mod:`.gated_linear`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from deepinfer_core.api import BuildContext, GatedLinearRequest, WeightPart

from .few_rows import launch
from .fixed_linear import FixedOrderLinear, thumb
from .linear import PackedWeight, few_tiles
from .swiglu import Swiglu


class FixedOrderGatedLinear:
    """``silu(x @ G.T) * (x @ U.T)`` of a weight that holds G, then U."""

    def __init__(self, request: GatedLinearRequest, context: BuildContext) -> None:
        self._linear = FixedOrderLinear(request.linear, context)
        tiles = few_tiles(request.linear, context, "fixed_gated_linear", partial(thumb, self._linear.splits))
        # Tensor descriptors bring both halves of a tile for sums that are not cut only.
        self._tiles = {
            rows: tile
            for rows, tile in tiles.items()
            if tile is not None and self._linear.agrees(tile) and not (tile.described and tile.splits > 1)
        }
        self._swiglu = Swiglu(request.swiglu, context)
        self._width = request.width
        self._limit = request.limit

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
                rounded=True,
            )
        return out
