"""``gemm.linear`` with FP8 weights in blocks: of rows as they are, and of rows that are rounded to FP8 first.

Few rows read the weight at one byte an element. Many rows that stay as they are meet a widened copy in cuBLAS; many
rounded rows run on the matrix unit's FP8. Tiles come from the table of the device's architecture, or a rule of thumb.
Under the demand ``batch_invariant`` all rows go through one tile.

Floor: as in :mod:`.fp8_few_rows` and :mod:`.fp8_many_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer_core.api import BuildContext, LinearRequest, WeightPart
from deepinfer_nvidia_sm100.fp8_tables import fp8_tile

from . import fp8_few_rows, fp8_hopper, fp8_many_rows
from .few_rows import Tile
from .fp8_hopper import HopperTile
from .fp8_many_rows import ManyTile, multiprocessors
from .fp8_weight import GROUP, Fp8Weight, pack
from .linear import multiplied
from .quantise_rows import quantise_rows
from .widen_weight import widen

FIXED_ROWS = 64
TARGET_PROGRAMS = 256
PLAIN_FEW = 128
"""Rows up to which an unmeasured weight is not widened."""
ROUNDED_FEW = 64


def thumb_few(out_features: int, in_features: int, rows: int) -> Tile:
    """A tile for a shape that was not measured: enough programs, deep pipelines."""
    block_m = next(size for size in (16, 32, 64) if size >= min(rows, 64))
    tiles = -(-out_features // 64) * -(-rows // block_m)
    splits = 1
    while tiles * splits < TARGET_PROGRAMS and splits < 4 and in_features // 128 >= 4 * splits:
        splits *= 2
    return Tile(block_n=64, block_m=block_m, block_k=128, splits=splits, stages=4, warps=4)


MANY = ManyTile(block_m=128, block_n=128, halves=1, stages=4, warps=8)


def thumb_many(out_features: int, rows: int, device: torch.device) -> ManyTile | HopperTile:
    """The same for many rows."""
    if not fp8_hopper.usable(device):
        return MANY
    # Larger tiles read less for each product, but must be enough for every multiprocessor.
    enough = 3 * multiprocessors(device) // 4
    for block_m, block_n, stages in ((256, 128, 4), (128, 128, 5)):
        if -(-rows // block_m) * -(-out_features // block_n) >= enough:
            return HopperTile(block_m=block_m, block_n=block_n, stages=stages)
    return HopperTile(block_m=128, block_n=64, stages=8)


def multiply_many(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: Fp8Weight,
    out: torch.Tensor,
    tile: ManyTile | HopperTile,
    *,
    compile_only: bool = False,
) -> None:
    """``out = x @ W.T (+ bias)`` of rounded rows, by the kernel that the tile belongs to."""
    given = x, x_scale, weight.data, weight.scale, weight.rows, weight.bias, out
    if isinstance(tile, HopperTile):
        fp8_hopper.launch(*given, tile, compile_only=compile_only)
    else:
        fp8_many_rows.launch(*given, tile, compile_only=compile_only)


class _Fp8Linear:
    def __init__(self, request: LinearRequest, context: BuildContext) -> None:
        self._request = request
        self._device = context.device
        self._own = None if context.settings is None else context.settings.table
        self._out_dtype: torch.dtype = getattr(torch, request.out_dtype)
        self._fixed = "batch_invariant" in request.demands
        tiles = -(-request.out_features // 16) * max(1, -(-context.max_tokens // 16))
        self._arrived = torch.zeros(tiles, dtype=torch.int32, device=context.device)

    def prepare(self, weights: Sequence[WeightPart], bias: torch.Tensor | None = None) -> Fp8Weight:
        """On the device, as stored."""
        return pack(self._request, self._device, weights, bias)

    def _empty(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty((x.shape[0], self._request.out_features), dtype=self._out_dtype, device=x.device)

    def _few(
        self, x: torch.Tensor, x_scale: torch.Tensor | None, weight: Fp8Weight, out: torch.Tensor, tile: Tile
    ) -> None:
        fp8_few_rows.launch(x, x_scale, weight.data, weight.scale, weight.rows, weight.bias, out, tile, self._arrived)

    def _thumb(self, rows: int) -> Tile:
        return thumb_few(self._request.out_features, self._request.in_features, FIXED_ROWS if self._fixed else rows)


class Fp8Linear(_Fp8Linear):
    """``y = x @ W.T (+ bias)``, x as it is."""

    def run(self, x: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
        """``[M, in_features]`` -> ``[M, out_features]``, fresh memory."""
        tile = self._thumb(1) if self._fixed else self._tile(x.shape[0])
        if tile is None and x.shape[0]:
            return multiplied(x, widen(weight, x.dtype), weight.bias, self._out_dtype)
        out = self._empty(x)
        if out.numel() and tile is not None:
            self._few(x if x.stride(-1) == 1 else x.contiguous(), None, weight, out, tile)
        return out

    def _tile(self, rows: int) -> Tile | None:
        """None where widening the weight is faster."""
        request = self._request
        found = fp8_tile("plain", self._device, request.out_features, request.in_features, rows, self._own)
        if found == "thumb":
            return self._thumb(rows) if rows <= PLAIN_FEW else None
        assert found is None or isinstance(found, Tile)
        return found


class RoundedFp8Linear(_Fp8Linear):
    """The same, rows rounded to FP8 in groups of 128."""

    def run(self, x: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
        """``[M, in_features]`` -> ``[M, out_features]``, fresh memory."""
        out = self._empty(x)
        if out.numel():
            rounded, scale = quantise_rows(x)
            tile = self._tile(x.shape[0], weight)
            if isinstance(tile, Tile):
                self._few(rounded, scale, weight, out, tile)
            else:
                self._many(rounded, scale, weight, out, tile)
        return out

    def _many(
        self,
        x: torch.Tensor,
        x_scale: torch.Tensor,
        weight: Fp8Weight,
        out: torch.Tensor,
        tile: ManyTile | HopperTile,
    ) -> None:
        multiply_many(x, x_scale, weight, out, tile)

    def _tile(self, rows: int, weight: Fp8Weight) -> Tile | ManyTile | HopperTile:
        request = self._request
        if self._fixed or weight.rows % GROUP:
            return self._thumb(rows)
        found = fp8_tile("rounded", self._device, request.out_features, request.in_features, rows, self._own)
        unusable = isinstance(found, HopperTile) and not fp8_hopper.usable(self._device)
        if found == "thumb" or found is None or unusable:
            return self._thumb(rows) if rows <= ROUNDED_FEW else thumb_many(request.out_features, rows, self._device)
        return found
