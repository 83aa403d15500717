"""``fused.gated_linear`` whose rows have the same bits in any company: few rows in one kernel, many in two.

The kernel that does both rounds the product as the two would have written it, so that either gives a row the same bits.

Floor: as :mod:`.gated_linear`.
"""

from __future__ import annotations

from deepinfer_core.api import BuildContext, GatedLinearRequest

from .fixed_linear import FixedOrderLinear, fixed_tiles
from .gated_linear import Gated


class FixedOrderGatedLinear(Gated):
    """With the tiles that cut K as the product of many rows does."""

    def __init__(self, request: GatedLinearRequest, context: BuildContext) -> None:
        linear = FixedOrderLinear(request.linear, context)
        tiles = fixed_tiles(request.linear, context, "fixed_gated_linear", linear.splits)
        # Tensor descriptors bring both halves of a tile for sums that are not cut only.
        agreeing = {
            rows: tile
            for rows, tile in tiles.items()
            if tile is not None and linear.agrees(tile) and not (tile.described and tile.splits > 1)
        }
        super().__init__(request, context, linear, agreeing, rounded=True)
