"""``gemm.linear``: few rows by :mod:`.few_rows`, many by cuBLAS, as measured.

Which one, and its tile, comes from the table of the device's architecture (:mod:`..tables`); a shape that is not in
it gets a rule of thumb. Nothing is tried out at run time.

Floor: as in :mod:`.few_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from deepinfer_core.api import BuildContext, LinearRequest, WeightPart
from deepinfer_nvidia_sm100.tables import linear_tile

from .few_rows import AnyTile, Tile, launch

FEW = 64
"""Rows up to which reading the weight is all the time there is."""
ROWS = (16, 32, 64)
"""Rows of a tile: the smallest that holds the step's rows."""
TARGET_PROGRAMS = 256
LEAST_COLUMNS = 2
"""Of a tile: as many counters as there can be tiles are kept."""


@attrs.frozen
class PackedWeight:
    """``weight [out_features, in_features]`` and ``bias [out_features]`` or None, in the compute dtype."""

    weight: torch.Tensor
    bias: torch.Tensor | None


def pack(
    request: LinearRequest, device: torch.device, weights: Sequence[WeightPart], bias: torch.Tensor | None
) -> PackedWeight:
    """Stack plain ``[out_i, in_features]`` parts along the output; a single part already in place stays where it is."""
    dtype: torch.dtype = getattr(torch, request.dtype)
    plain = [part.to(device=device, dtype=dtype) for part in weights if isinstance(part, torch.Tensor)]
    weight = plain[0] if len(plain) == 1 else torch.cat(plain)
    expected = (request.out_features, request.in_features)
    if tuple(weight.shape) != expected:
        raise ValueError(f"linear weight has shape {tuple(weight.shape)}; the request says {expected}")
    return PackedWeight(weight.contiguous(), None if bias is None else bias.to(device=device, dtype=dtype))


def thumb(out_features: int, in_features: int, rows: int) -> Tile:
    """A tile for a shape that was not measured: enough programs, deep pipelines."""
    block_m = next(size for size in ROWS if size >= min(rows, FEW))
    tiles = -(-out_features // 64)
    splits = 1
    while tiles * splits < TARGET_PROGRAMS and splits < 8 and in_features % (128 * splits * 2) == 0:
        splits *= 2
    return Tile(block_n=64, block_m=block_m, block_k=128, splits=splits, stages=4, warps=4)


def few_tiles(
    request: LinearRequest,
    context: BuildContext,
    section: str = "linear",
    unmeasured: Callable[[int, int, int], AnyTile | None] = thumb,
    most: int = FEW,
) -> dict[int, AnyTile | None]:
    """Tiles of all numbers of rows up to ``most``, for which they can be faster than cuBLAS; None where they were
    measured not to be.

    ``section``: of the table (:mod:`..tables`). ``unmeasured``: makes the tile of a shape that is not there.
    """
    own = None if context.settings is None else context.settings.table
    tiles: dict[int, AnyTile | None] = {}
    for rows in range(1, most + 1) if request.dtype != "float32" else ():
        found = linear_tile(context.device, request.out_features, request.in_features, rows, own, section)
        tiles[rows] = unmeasured(request.out_features, request.in_features, rows) if found == "thumb" else found
    return tiles


def multiplied(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """``x [M, K] @ weight [N, K].T (+ bias)`` by cuBLAS, sums rounded to ``out_dtype`` once."""
    if out_dtype == x.dtype:
        return torch.nn.functional.linear(x, weight, bias)
    if x.device.type == "cuda":
        out = torch.mm(x, weight.t(), out_dtype=out_dtype)
    else:
        out = torch.mm(x.to(out_dtype), weight.t().to(out_dtype))
    return out if bias is None else out.add_(bias)


class _Linear:
    def __init__(self, request: LinearRequest, context: BuildContext) -> None:
        self._request = request
        self._device = context.device
        self._dtype: torch.dtype = getattr(torch, request.dtype)
        self._out_dtype: torch.dtype = getattr(torch, request.out_dtype)
        self._arrived = torch.zeros(-(-request.out_features // LEAST_COLUMNS), dtype=torch.int32, device=context.device)

    def prepare(self, weights: Sequence[WeightPart], bias: torch.Tensor | None = None) -> PackedWeight:
        """On the device, in the compute dtype."""
        return pack(self._request, self._device, weights, bias)

    def _few(self, x: torch.Tensor, weight: PackedWeight, tile: AnyTile) -> torch.Tensor:
        out = torch.empty((x.shape[0], weight.weight.shape[0]), dtype=self._out_dtype, device=x.device)
        if out.numel():
            x = x if x.stride(-1) == 1 else x.contiguous()
            launch(x, weight.weight, weight.bias, out, tile, self._arrived)
        return out


class Linear(_Linear):
    """``y = x @ W.T (+ bias)``."""

    def __init__(self, request: LinearRequest, context: BuildContext) -> None:
        super().__init__(request, context)
        self._tiles = few_tiles(request, context)

    @property
    def arrived(self) -> torch.Tensor:
        """Zeros that the kernel counts with, for what runs in this operator's place."""
        return self._arrived

    def run(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """``[M, in_features]`` -> ``[M, out_features]``, fresh memory."""
        tile = self._tiles.get(x.shape[0])
        if tile is None:
            return multiplied(x, weight.weight, weight.bias, self._out_dtype)
        return self._few(x, weight, tile)
