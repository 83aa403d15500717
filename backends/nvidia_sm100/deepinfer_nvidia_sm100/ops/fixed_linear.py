"""Matrix products whose rows have the same bits in any company, for 1 row and for thousands.

A sum over K is cut into as many parts as the weight's shape says, whatever the number of rows. A part is added by the
matrix unit from its first element to its last, sixteen at a time, in tiles of every size: so tiles may follow the
number of rows. Parts are added in order, by the program that arrives last or by the one that computed them all
(:mod:`.fixed_many`). That tiles do not show is nowhere promised; the tests compare bits.

cuBLAS does the same for sums that are not cut, wherever it does not split K, which it decides by the number of rows.
So it is tried, when the first weight is prepared: for every number of rows that it may be used for, the bits of all
rows must be those of this package's kernel. What fails is computed here.

Floor: bytes of the weight, 2·N·K in 16 bits, for up to about 100 rows; operations beyond.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import attrs
import torch

from deepinfer_core.api import BuildContext, ConfigError, LinearRequest, WeightPart
from deepinfer_nvidia_sm100 import tables

from .few_rows import UNIT, Tile, launch, part_length
from .fixed_many import ManyTile, launch_many, servable
from .linear import FEW, PackedWeight, few_tiles, pack

EACH = 256
"""Numbers of rows up to this have tiles of their own, or are tried one by one; beyond it multiples of :data:`STEP`."""
STEP = 64
SINGLE = Tile(block_n=64, block_m=64, block_k=32, splits=1, stages=3, warps=4)
"""In float32, whatever the number of rows: sums there are ordinary instructions, whose order may follow the tile."""
TURNED = Tile(block_n=128, block_m=128, block_k=128, splits=1, stages=3, warps=8)
"""In 16 bits, of many rows that the copy engine cannot read."""
MANY = ManyTile(rows=128, columns=128, step=64, stages=5, warps=8)
"""In 16 bits, of other rows than those with tiles of their own."""
NARROW = ManyTile(rows=128, columns=64, step=64, stages=4, warps=4)
"""The same for 10.x, where two sums of the larger tile spill registers."""
FEW_PROGRAMS, SHORTEST = 100, 2048
"""A sum is cut where tiles of 64 columns are fewer than this, into parts of at least this many elements."""


def splits_of(columns: int, inner: int) -> int:
    """Parts of K for a weight ``[columns, inner]`` that was not measured."""
    splits = 1
    while -(-columns // 64) * splits < FEW_PROGRAMS and inner >= 2 * splits * SHORTEST:
        splits *= 2
    return splits


def thumb(splits: int, columns: int, inner: int, rows: int) -> Tile | None:
    """A tile for a shape that was not measured, nearly the fastest for those that were. None: cuBLAS."""
    if rows <= FEW:
        block_m = next(size for size in (16, 32, 64) if size >= rows)
        return Tile(block_n=64, block_m=block_m, block_k=128, splits=splits, stages=6 if splits == 1 else 4, warps=4)
    return None if splits == 1 else attrs.evolve(TURNED, splits=splits)


def fixed_tiles(
    request: LinearRequest, context: BuildContext, section: str, splits: int, most: int = FEW
) -> dict[int, Tile | None]:
    """As :func:`few_tiles`. There is no :class:`HeldTile` among them: its sums have an order of their own."""
    found = few_tiles(request, context, section, partial(thumb, splits), most)
    return {rows: tile for rows, tile in found.items() if tile is None or isinstance(tile, Tile)}


def _splits(request: LinearRequest, context: BuildContext) -> int:
    """Of the table's first tile for this shape, or by rule."""
    if request.dtype == "float32":
        return 1
    own = None if context.settings is None else context.settings.table
    first = tables.linear_tile(context.device, request.out_features, request.in_features, 1, own, "fixed_linear")
    if isinstance(first, Tile):
        return first.splits
    return 1 if first is None else splits_of(request.out_features, request.in_features)


class FixedOrderLinear:
    """``y = x @ W.T (+ bias)``, a row's bits its own whatever the number of rows."""

    def __init__(self, request: LinearRequest, context: BuildContext) -> None:
        self._request = request
        self._device = context.device
        self._out_dtype: torch.dtype = getattr(torch, request.out_dtype)
        self._most = context.max_tokens
        self._many = NARROW if tables.architecture(context.device).startswith("sm_10") else MANY
        self._steady: frozenset[int] | None = None
        self.splits = _splits(request, context)
        self._tiles = fixed_tiles(request, context, "fixed_linear", self.splits, EACH)
        self._length = part_length(request.in_features, self.splits, UNIT)
        for tile in self._tiles.values():
            if tile is not None and not self.agrees(tile):
                raise ConfigError(
                    f"plugins.nvidia_sm100.table: fixed_linear {request.out_features}x{request.in_features}: {tile} "
                    f"does not cut K into {self.splits} parts of {self._length} as the first tile does; "
                    "make the table with: deepinfer tune"
                )
        self.arrived = torch.zeros(self._counters(), dtype=torch.int32, device=context.device)
        """Zeros that kernels count with, for what runs in this operator's place too."""

    def agrees(self, tile: Tile) -> bool:
        """Whether a tile cuts K as this operator does."""
        inner = self._request.in_features
        return tile.splits == self.splits and (
            self.splits == 1 or part_length(inner, tile.splits, tile.block_k) == self._length
        )

    def prepare(self, weights: Sequence[WeightPart], bias: torch.Tensor | None = None) -> PackedWeight:
        """On the device, in the compute dtype. The first weight tells where cuBLAS sums in the same order."""
        packed = pack(self._request, self._device, weights, bias)
        if self._steady is None:
            self._steady = self._tried(packed)
        return packed

    def run(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """``[M, in_features]`` -> ``[M, out_features]``, fresh memory."""
        x = x if x.is_contiguous() else x.contiguous()
        rows = x.shape[0]
        out = torch.empty((rows, self._request.out_features), dtype=self._out_dtype, device=x.device)
        tile = self._tiles.get(rows)
        if tile is not None:
            launch(x, weight.weight, weight.bias, out, tile, self.arrived)
            return out
        taken = self._by_library(rows)
        if taken:
            self._library(x[:taken], weight, out[:taken])
        if taken < rows:
            self._own(x[taken:], weight, out[taken:])
        return out

    def _counters(self) -> int:
        """Tiles of the largest product whose parts meet by counting."""
        rows, columns = max(EACH, self._most), self._request.out_features
        tiles = {(n, t.block_m, t.block_n) for n, t in self._tiles.items() if t is not None and t.splits > 1}
        tiles.add((rows if self.splits > 1 else 1, TURNED.block_m, TURNED.block_n))
        return max(-(-n // block_m) * -(-columns // block_n) for n, block_m, block_n in tiles)

    def _by_library(self, rows: int) -> int:
        """How many of these rows, from the first on, cuBLAS computes."""
        if not self._steady:
            return 0
        if rows in self._steady:
            return rows
        below = rows // STEP * STEP
        return below if below > FEW and below in self._steady else 0

    def _own(self, x: torch.Tensor, weight: PackedWeight, out: torch.Tensor) -> None:
        if not x.shape[0]:
            return
        if self._request.dtype == "float32":
            launch(x, weight.weight, weight.bias, out, SINGLE, self.arrived)
        elif servable(x, weight.weight):
            launch_many(x, weight.weight, weight.bias, out, self._many, self.splits, self._length)
        else:
            launch(x, weight.weight, weight.bias, out, attrs.evolve(TURNED, splits=self.splits), self.arrived)

    def _library(self, x: torch.Tensor, weight: PackedWeight, out: torch.Tensor) -> None:
        turned = weight.weight.t()
        if self._out_dtype != x.dtype:
            torch.mm(x, turned, out_dtype=self._out_dtype, out=out)
            if weight.bias is not None:
                out.add_(weight.bias)
        elif weight.bias is None:
            torch.mm(x, turned, out=out)
        else:
            torch.addmm(weight.bias, x, turned, out=out)

    def _tried(self, weight: PackedWeight) -> frozenset[int]:
        """Numbers of rows for which cuBLAS gives the bits of :meth:`_own`, on this machine, for this shape. Where the
        trial has no room there are none: this package's kernels serve, with the same bits."""
        if self._device.type != "cuda" or self._request.dtype == "float32" or self.splits > 1:
            return frozenset()
        try:
            return self._equal_counts(weight)
        except torch.OutOfMemoryError:  # two results of max_tokens rows: gigabytes of a large vocabulary's logits
            return frozenset()

    def _equal_counts(self, weight: PackedWeight) -> frozenset[int]:
        most = max(EACH, self._most)
        counts = [n for n, tile in self._tiles.items() if tile is None]
        counts += range(EACH + STEP, most + 1, STEP)
        draw = torch.Generator(self._device).manual_seed(0)
        x = torch.randn((most, self._request.in_features), generator=draw, device=self._device).to(weight.weight.dtype)
        expected, found = (
            torch.empty((most, self._request.out_features), dtype=self._out_dtype, device=self._device)
            for _ in range(2)
        )
        self._own(x, weight, expected)
        if not self._tells(x[:FEW], weight, expected[:FEW]):
            return frozenset()
        same = []
        for count in counts:
            self._library(x[:count], weight, found[:count])
            same.append((found[:count] == expected[:count]).all())
        return frozenset(n for n, equal in zip(counts, torch.stack(same).tolist(), strict=True) if equal)

    def _tells(self, x: torch.Tensor, weight: PackedWeight, expected: torch.Tensor) -> bool:
        """Whether another order of adding would show: not with a weight of zeros, say."""
        other = torch.empty_like(expected)
        tile = attrs.evolve(SINGLE, block_k=64, splits=4)
        arrived = torch.zeros(-(-other.shape[1] // 64), dtype=torch.int32, device=x.device)
        launch(x, weight.weight, weight.bias, other, tile, arrived)
        return not torch.equal(other, expected)
