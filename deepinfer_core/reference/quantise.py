"""Quantise-dequantise: what a packed cache would have kept of a value."""

from __future__ import annotations

import math

import torch

from deepinfer_core.api import BuildContext, QuantiseDequantiseRequest

from .fp_formats import E2M1_VALUES

# format -> (largest magnitude, smallest group maximum)
_LIMITS = {"fp8:e4m3": (448.0, 1e-4), "fp4:e2m1": (6.0, 6.0 * 2.0**-126)}


class QuantiseDequantise:
    """Rounds the first ``channels`` of ``width``, in float32."""

    def __init__(self, request: QuantiseDequantiseRequest, context: BuildContext) -> None:
        if request.channels % request.group:
            raise ValueError(f"channels={request.channels} is no multiple of group={request.group}")
        self._request = request
        self._hadamard = hadamard(request.width, context.device) if request.hadamard else None

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., width]`` -> same shape and dtype."""
        r = self._request
        wide = x.to(torch.float32)
        if self._hadamard is not None:
            wide = (wide @ self._hadamard).to(x.dtype).to(torch.float32)
        rounded = round_groups(wide[..., : r.channels], r.format, r.group)
        return torch.cat((rounded, wide[..., r.channels :]), dim=-1).to(x.dtype)


def round_groups(x: torch.Tensor, format: str, group: int) -> torch.Tensor:
    """``[..., channels]`` float32, each group of channels scaled by a power of two and rounded to the grid."""
    largest, floor = _LIMITS[format]
    grouped = x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
    maximum = grouped.abs().amax(-1, keepdim=True).clamp(min=floor)
    # A NaN has no power of two above it: its group is NaN, so that what holds it can be told.
    scale = torch.where(maximum.isnan(), maximum, power_of_two_above(maximum / largest))
    codes = (grouped / scale).clamp(-largest, largest)
    codes = codes.to(torch.float8_e4m3fn).to(torch.float32) if format == "fp8:e4m3" else _round_e2m1(codes)
    return (codes * scale).flatten(-2)


def power_of_two_above(x: torch.Tensor) -> torch.Tensor:
    """The least power of two that is not below x (positive, normal float32), from its bits: exact."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def _round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest of the eight magnitudes; a tie goes to the even code."""
    grid = torch.tensor(E2M1_VALUES, device=x.device)
    magnitude = x.abs()
    middles = (grid[1:] + grid[:-1]) / 2
    # Below or at the middle above an even code: that code. Above an odd code, the middle itself goes up.
    low = torch.bucketize(magnitude, middles, right=False)
    high = torch.bucketize(magnitude, middles, right=True)
    code = torch.where(low % 2 == 0, low, high)
    return torch.copysign(grid[code], x)


def hadamard(width: int, device: torch.device) -> torch.Tensor:
    """Orthonormal Walsh-Hadamard matrix ``[width, width]`` in natural (Sylvester) order, float32; symmetric."""
    if width < 1 or width & (width - 1):
        raise ValueError(f"hadamard: width={width} is no power of two")
    matrix = torch.ones((1, 1), device=device)
    while matrix.shape[0] < width:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return matrix / math.sqrt(width)
