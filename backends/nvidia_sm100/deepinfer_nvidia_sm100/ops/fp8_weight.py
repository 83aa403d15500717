"""FP8 weights in blocks, as they are kept on the device: their bytes, and their scales in float32."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from deepinfer_core.api import LinearRequest, QuantisedWeight, WeightPart

GROUP = 128
"""Inner elements that share a scale."""


@attrs.frozen
class Fp8Weight:
    """``W[n, k] = data[n, k] * scale[n // rows, k // 128]``.

    ``data [out, in]`` e4m3; ``scale [ceil(out / rows), in / 128]`` float32; ``bias [out]`` or None.
    """

    data: torch.Tensor
    scale: torch.Tensor
    rows: int
    bias: torch.Tensor | None


def pack(
    request: LinearRequest, device: torch.device, weights: Sequence[WeightPart], bias: torch.Tensor | None
) -> Fp8Weight:
    """Stack parts along the output. Where one ends within a block, scales are kept for each row instead.

    Raises:
        TypeError: data or scale is of another type than the format says.
        ValueError: the parts do not have the request's shape, or their scales do not cover them.
    """
    parts = [part for part in weights if isinstance(part, QuantisedWeight)]
    shape = (sum(part.shape[0] for part in parts), parts[0].shape[1] if parts else 0)
    expected = (request.out_features, request.in_features)
    if len(parts) != len(weights) or shape != expected:
        raise ValueError(f"FP8 linear weight has shape {shape}; the request says {expected}")
    rows = parts[0].block[0]
    whole = all(part.shape[0] % rows == 0 for part in parts[:-1])
    scales = []
    for part in parts:
        if part.data.dtype != torch.float8_e4m3fn:
            raise TypeError(f"FP8 data is {part.data.dtype}: expected torch.float8_e4m3fn")
        covered = (-(-part.shape[0] // rows), part.shape[1] // GROUP)
        if tuple(part.scale.shape) != covered or part.block != parts[0].block:
            raise ValueError(f"scale of shape {tuple(part.scale.shape)} in blocks of {part.block}: expected {covered}")
        scale = _values(part.scale.to(device))
        scales.append(scale if whole else scale.repeat_interleave(rows, 0)[: part.shape[0]])
    data = [part.data.to(device) for part in parts]
    return Fp8Weight(
        data=data[0].contiguous() if len(data) == 1 else _stacked(data),
        scale=torch.cat(scales).contiguous(),
        rows=rows if whole else 1,
        bias=None if bias is None else bias.to(device=device, dtype=getattr(torch, request.dtype)),
    )


def _stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)


def _values(scale: torch.Tensor) -> torch.Tensor:
    """e8m0 bytes as float32, from their bits: 0 is the subnormal 2^-127, 255 is NaN."""
    if scale.dtype != torch.float8_e8m0fnu:
        raise TypeError(f"scales are {scale.dtype}: expected torch.float8_e8m0fnu")
    codes = scale.view(torch.uint8).to(torch.int32)
    bits = torch.where(codes == 0, 1 << 22, codes << 23)
    return torch.where(codes == 255, 0x7FC00000, bits).view(torch.float32)
