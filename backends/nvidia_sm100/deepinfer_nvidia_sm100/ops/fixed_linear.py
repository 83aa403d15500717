"""Matrix products whose rows have the same bits in any company, for 1 row and for thousands.

A sum over K that is never split is added by the matrix unit from its first element to its last, sixteen at a time, in
tiles of every size: so tiles may follow the number of rows. That this is so is nowhere promised; the tests compare
bits. cuBLAS does the same wherever it does not split K, which it decides by the number of rows. So it is tried, when
the first weight is prepared: for every number of rows that it may be used for, the bits of all rows must be those of
this package's kernel. What fails is computed here.

Floor: bytes of the weight, 2·N·K in 16 bits, for up to about 100 rows; operations beyond.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from deepinfer_core.api import BuildContext, LinearRequest, WeightPart

from .few_rows import Tile, launch
from .linear import FEW, PackedWeight, few_tiles, pack

EACH = 256
"""Numbers of rows up to this are tried one by one, beyond it multiples of :data:`STEP`."""
STEP = 64
SINGLE = Tile(block_n=64, block_m=64, block_k=32, splits=1, stages=3, warps=4)
"""In float32, whatever the number of rows: sums there are ordinary instructions, whose order may follow the tile."""
MANY = Tile(block_n=128, block_m=128, block_k=64, splits=1, stages=4, warps=8)
"""In 16 bits, beyond :data:`FEW` rows."""


def thumb(rows: int) -> Tile:
    """A tile for a shape that was not measured: of those that were, nearly all are fastest by this one."""
    block_m = next(size for size in (16, 32, 64) if size >= rows)
    return Tile(block_n=64, block_m=block_m, block_k=128, splits=1, stages=6, warps=4)


class FixedOrderLinear:
    """``y = x @ W.T (+ bias)``, a row's bits its own whatever the number of rows."""

    def __init__(self, request: LinearRequest, context: BuildContext) -> None:
        self._request = request
        self._device = context.device
        self._out_dtype: torch.dtype = getattr(torch, request.out_dtype)
        self._most = context.max_tokens
        self._none = torch.zeros(1, dtype=torch.int32, device=context.device)  # no parts arrive: none is split
        self._steady: frozenset[int] | None = None
        self._tiles = few_tiles(request, context, "fixed_linear", lambda columns, inner, rows: thumb(rows))

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
        taken = self._by_library(rows)
        if taken:
            self._library(x[:taken], weight, out[:taken])
        if taken < rows:
            self._own(x[taken:], weight, out[taken:])
        return out

    def _by_library(self, rows: int) -> int:
        """How many of these rows, from the first on, cuBLAS computes."""
        if not self._steady or (rows <= FEW and self._tiles.get(rows) is not None):
            return 0
        if rows in self._steady:
            return rows
        below = rows // STEP * STEP
        return below if below > FEW and below in self._steady else 0

    def _own(self, x: torch.Tensor, weight: PackedWeight, out: torch.Tensor) -> None:
        launch(x, weight.weight, weight.bias, out, self._tile(x.shape[0]), self._none)

    def _tile(self, rows: int) -> Tile:
        if self._request.dtype == "float32":
            return SINGLE
        if rows > FEW:
            return MANY
        return self._tiles[rows] or thumb(rows)

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
        """Numbers of rows for which cuBLAS gives the bits of :meth:`_own`, on this machine and for this shape."""
        if self._device.type != "cuda" or self._request.dtype == "float32":
            return frozenset()
        most = max(EACH, self._most)
        counts = [n for n, tile in self._tiles.items() if tile is None]
        counts += [*range(FEW + 1, EACH + 1), *range(EACH + STEP, most + 1, STEP)]
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
