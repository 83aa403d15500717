"""``gemm.linear`` over the kernels of :mod:`.triton_kernels`, for devices that Triton compiles for.

What decides a row's bits is fixed by the weight's shape and dtype: the step along K, and how many stretches it is cut
into. Tiles differ with the number of rows, as far as they give the same bits on this device, which is tried.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
import triton

from deepinfer_core.api import BuildContext, LinearRequest

from .self_check import moved, random_row, same_bits
from .triton_kernels import add_parts_kernel, gemm_kernel

GROUP = 8
"""Tiles of rows that run together."""
ENOUGH_PROGRAMS, MOST_PARTS = 256, 8
"""K is cut until one tile of rows makes that many programs."""
LEAST_STEPS = 2
"""Of a stretch: a product of one step is folded into the sum before it, which rounds otherwise."""
ADD_BLOCK = 512


@attrs.frozen(kw_only=True)
class Tile:
    """Up to ``rows`` rows by tiles of ``m`` rows and ``n`` columns; ``spread``: stretches of K side by side."""

    rows: int
    m: int
    n: int
    warps: int
    stages: int
    spread: bool


NARROW_STEP, WIDE_STEP = 64, 32
"""Along K, for elements of two bytes and of four."""
MANY = 1 << 62
NARROW = (
    Tile(rows=32, m=16, n=128, warps=4, stages=4, spread=True),
    Tile(rows=256, m=64, n=128, warps=4, stages=4, spread=True),
    Tile(rows=MANY, m=128, n=128, warps=8, stages=3, spread=False),
)
WIDE = (
    Tile(rows=32, m=32, n=64, warps=4, stages=3, spread=True),
    Tile(rows=MANY, m=64, n=64, warps=8, stages=3, spread=False),
)


@attrs.frozen(eq=False)
class Weight:
    """``weight [out, in]`` and ``bias [out]`` or None, on the device, in the compute dtype."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class FixedTileLinear:
    """``y = x @ W.T (+ bias)``."""

    def __init__(self, request: LinearRequest, context: BuildContext) -> None:
        self._request = request
        self._device = context.device
        self._dtype: torch.dtype = getattr(torch, request.dtype)
        self._out_dtype: torch.dtype = getattr(torch, request.out_dtype)
        wide = request.dtype == "float32"
        self._step = WIDE_STEP if wide else NARROW_STEP
        self._parts = parts(request.out_features, request.in_features, self._step)
        self._offered = WIDE if wide else NARROW
        self._tiles: tuple[Tile, ...] = ()

    def prepare(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> Weight:
        """Stack ``[out_i, in_features]`` parts along the output; the first weight is tried."""
        weight = torch.cat([part.to(self._device, self._dtype) for part in weights])
        expected = (self._request.out_features, self._request.in_features)
        if tuple(weight.shape) != expected:
            raise ValueError(f"linear weight has shape {tuple(weight.shape)}; the request says {expected}")
        ready = Weight(weight, None if bias is None else bias.to(self._device, self._dtype))
        self._tiles = self._tiles or self._steady(ready)
        return ready

    def run(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """``[M, in_features]`` -> ``[M, out_features]``."""
        return self._by(next(tile for tile in self._tiles if x.shape[0] <= tile.rows), x, weight)

    def _steady(self, weight: Weight) -> tuple[Tile, ...]:
        """The tiles that give every row the bits that the last gives it."""
        row = random_row(self._request.in_features, dtype=self._dtype, device=self._device)
        last = self._offered[-1]
        # Every place of a tile, and one row more, with other numbers in each.
        x = torch.stack([row.roll(place) for place in range(last.m + 1)])
        found = [self._by(tile, x, weight) for tile in self._offered]
        wanted = found[-1]
        for place in (0, 1, last.m - 1):
            if not same_bits(self._by(last, x[place : place + 1], weight)[0], wanted[place]):
                raise moved(f"gemm of {x.shape[1]} to {wanted.shape[1]} channels", f"1 and {len(x)} rows differ")
        return tuple(tile for tile, y in zip(self._offered, found, strict=True) if same_bits(y, wanted))

    def _by(self, tile: Tile, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        (columns, inner), rows = weight.weight.shape, x.shape[0]
        x = x if x.stride(-1) == 1 else x.contiguous()
        y = torch.empty((rows, columns), dtype=self._out_dtype, device=x.device)
        if not y.numel():
            return y
        spread = tile.spread and self._parts > 1
        has_bias = weight.bias is not None
        bias = weight.weight if weight.bias is None else weight.bias
        sums = torch.empty((self._parts, rows, columns), dtype=torch.float32, device=x.device) if spread else y
        grid = (triton.cdiv(rows, tile.m) * triton.cdiv(columns, tile.n), self._parts if spread else 1)
        gemm_kernel[grid](
            x,
            weight.weight,
            bias,
            sums,
            rows,
            columns,
            x.stride(0),
            INNER=inner,
            PARTS=self._parts,
            SPREAD=spread,
            HAS_BIAS=has_bias,
            PRECISION="ieee",
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
            BLOCK_K=self._step,
            GROUP=GROUP,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if spread:
            add_parts_kernel[(rows, triton.cdiv(columns, ADD_BLOCK))](
                sums, bias, y, rows, columns, PARTS=self._parts, HAS_BIAS=has_bias, BLOCK=ADD_BLOCK
            )
        return y


def parts(columns: int, inner: int, step: int) -> int:
    """Stretches of K for a weight ``[columns, inner]``: enough programs of 64 columns, none too short."""
    found, tiles = 1, -(-columns // 64)
    while tiles * found < ENOUGH_PROGRAMS and found < MOST_PARTS and inner >= 2 * found * step * LEAST_STEPS:
        found *= 2
    return found
