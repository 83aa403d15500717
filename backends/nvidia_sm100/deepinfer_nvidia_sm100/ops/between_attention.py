"""``fused.between_attention``: four products whose norms are computed at their ends (:mod:`.normed_rows`).

Two kernels fewer a layer than with norms of their own. Rows that some product leaves to cuBLAS go through its parts.

Floor: bytes of the four weights; what the norms themselves read and write is a thousandth of that at one row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from deepinfer_core.api import (
    BetweenAttentionRequest,
    BetweenPart,
    BetweenWeights,
    BuildContext,
    LinearRequest,
    WeightPart,
)
from deepinfer_nvidia_sm100.tables import linear_tile

from .few_rows import AnyTile, launch
from .gated_linear import GatedLinear
from .linear import Linear, PackedWeight, few_tiles, thumb
from .normed_rows import Add, Scale
from .rms_norm import RmsNorm

Tiles = dict[BetweenPart, AnyTile]
ROWS_ALONE = 16
"""Rows up to which tiles that were measured for each product alone made whole steps faster, too. At 64 rows it depends
on which programs of the next kernel come in beside those of the last: such tiles made steps 4 % slower than norms of
their own, others 4 % faster."""


def _tiles(request: LinearRequest, context: BuildContext, section: str = "linear") -> dict[int, AnyTile | None]:
    """What was measured among the products and attention of a layer; else, for very few rows, for the product alone."""
    own = None if context.settings is None else context.settings.table

    def alone(out_features: int, in_features: int, rows: int) -> AnyTile | None:
        if rows > ROWS_ALONE:
            return None
        found = linear_tile(context.device, out_features, in_features, rows, own, section)
        return thumb(out_features, in_features, rows) if found == "thumb" else found

    return few_tiles(request, context, "between_attention", alone)


class BetweenAttention:
    """Products, norms and residual sums between one layer's attention and the next one's."""

    def __init__(self, request: BetweenAttentionRequest, context: BuildContext) -> None:
        self._request = request
        self._norm = RmsNorm(request.norm, context)
        self._gated = GatedLinear(request.gated, context)
        self._linear: dict[BetweenPart, Linear] = {
            "attention_out": Linear(request.attention_out, context),
            "down": Linear(request.down, context),
            "qkv": Linear(request.qkv, context),
        }
        wanted = {
            "attention_out": _tiles(request.attention_out, context),
            "gate_up": _tiles(request.gated.linear, context, "gated_linear"),
            "down": _tiles(request.down, context),
            "qkv": _tiles(request.qkv, context),
        }
        self.tiles: dict[int, Tiles] = {}
        for rows in wanted["qkv"]:
            tiles = {part: of_rows[rows] for part, of_rows in wanted.items()}
            if None not in tiles.values():
                self.tiles[rows] = tiles  # type: ignore[assignment]  # no None among them

    def prepare(
        self, part: BetweenPart, weights: Sequence[WeightPart], bias: torch.Tensor | None = None
    ) -> PackedWeight:
        """On the device, in the compute dtype."""
        op = self._gated if part == "gate_up" else self._linear[part]
        return op.prepare(weights, bias)

    def first(self, residual: torch.Tensor, norm: torch.Tensor, qkv: PackedWeight) -> torch.Tensor:
        """``[T, hidden]`` -> ``[T, merged]``, fresh memory."""
        return self._linear["qkv"].run(self._norm.run(residual, norm), qkv)

    def run(
        self, attended: torch.Tensor, residual: torch.Tensor, weights: BetweenWeights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T, merged]``, or ``[T, hidden]`` behind the last layer; and the sum, which overwrites ``residual``."""
        tiles = self.tiles.get(attended.shape[0])
        if tiles is None:
            return self._by_parts(attended, residual, weights)
        attended = attended if attended.stride(-1) == 1 else attended.contiguous()
        residual = residual.contiguous()
        x, scale = self._added("attention_out", attended, weights.attention_out, residual, weights.norm, tiles)
        x = self._product("gate_up", x, weights.gate_up, tiles, scale=scale)
        if weights.next_qkv is None:
            return self._norm.add(self._product("down", x, weights.down, tiles), residual, weights.next_norm)
        x, scale = self._added("down", x, weights.down, residual, weights.next_norm, tiles)
        return self._product("qkv", x, weights.next_qkv, tiles, scale=scale), residual

    def _by_parts(
        self, attended: torch.Tensor, residual: torch.Tensor, weights: BetweenWeights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        linear = self._linear
        x = linear["attention_out"].run(attended, weights.attention_out)
        x, residual = self._norm.add(x, residual, weights.norm)
        x = linear["down"].run(self._gated.run(x, weights.gate_up), weights.down)
        x, residual = self._norm.add(x, residual, weights.next_norm)
        return (x if weights.next_qkv is None else linear["qkv"].run(x, weights.next_qkv)), residual

    def _added(
        self,
        part: BetweenPart,
        x: torch.Tensor,
        weight: PackedWeight,
        residual: torch.Tensor,
        norm: torch.Tensor,
        tiles: Tiles,
    ) -> tuple[torch.Tensor, Scale]:
        """Add a product to ``residual``; the sums times the norm's weight, and what scales products of them."""
        parts = triton.cdiv(self._request.hidden, tiles[part].block_n)
        squares = torch.empty((parts, x.shape[0]), dtype=torch.float32, device=x.device)
        found = self._product(part, x, weight, tiles, add=Add(residual, norm, squares))
        return found, Scale(squares, parts, self._request.eps)

    def _product(
        self,
        part: BetweenPart,
        x: torch.Tensor,
        weight: PackedWeight,
        tiles: Tiles,
        *,
        add: Add | None = None,
        scale: Scale | None = None,
    ) -> torch.Tensor:
        gated = part == "gate_up"
        columns = weight.weight.shape[0]
        out = torch.empty((x.shape[0], columns // 2 if gated else columns), dtype=x.dtype, device=x.device)
        counted = self._gated if gated else self._linear[part]
        launch(
            x,
            weight.weight,
            weight.bias,
            out,
            tiles[part],
            counted.arrived,
            gated=gated,
            limit=self._request.limit if gated else None,
            add=add,
            scale=scale,
        )
        return out
