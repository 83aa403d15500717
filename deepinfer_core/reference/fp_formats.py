"""Packed floating-point weights to numbers: FP8 in blocks and FP4 in groups, with power-of-two scales. Exact."""

from __future__ import annotations

import torch

from deepinfer_core.api import QuantisedWeight

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the eight codes; bit 3 is the sign."""


def dequantise(weight: QuantisedWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``[out, in]`` in ``dtype`` (float32, float64 or bfloat16: the first two hold every value exactly).

    Raises:
        TypeError: data or scale is stored in another type than the format says; bytes are never taken for numbers.
        ValueError: the scales do not cover the weight.
    """
    values = _fp8_values(weight.data) if weight.format == "fp8:e4m3" else e2m1_values(weight.data)
    rows, columns = weight.block
    expected = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    if tuple(weight.scale.shape) != expected:
        raise ValueError(
            f"scale of shape {tuple(weight.scale.shape)} for a weight {weight.shape} in blocks of {weight.block}: "
            f"expected {expected}"
        )
    scale = e8m0_values(weight.scale)
    if rows > 1:
        scale = scale.repeat_interleave(rows, 0)[: weight.shape[0]]
    whole = expected[1] * columns == weight.shape[1]
    if whole:  # no copy of the scale as wide as the weight
        scaled = values.view(weight.shape[0], expected[1], columns) * scale[:, :, None]
        return scaled.view(weight.shape).to(dtype)
    return (values * scale.repeat_interleave(columns, 1)[:, : weight.shape[1]]).to(dtype)


def e8m0_values(scale: torch.Tensor) -> torch.Tensor:
    """float8_e8m0fnu bytes -> ``2^(byte - 127)`` float32; 255 is NaN. The byte 0 is the subnormal 2^-127."""
    if scale.dtype != torch.float8_e8m0fnu:
        raise TypeError(f"scales are {scale.dtype}: expected torch.float8_e8m0fnu")
    table = torch.tensor([*(2.0 ** (byte - 127) for byte in range(255)), float("nan")], device=scale.device)
    return table[scale.view(torch.uint8).to(torch.int32)]


def e2m1_values(data: torch.Tensor) -> torch.Tensor:
    """int8 ``[out, in/2]`` -> float32 ``[out, in]``; the low half of a byte comes first."""
    if data.dtype not in (torch.int8, torch.uint8):
        raise TypeError(f"FP4 data is {data.dtype}: expected torch.int8")
    table = torch.tensor((*E2M1_VALUES, *(-value for value in E2M1_VALUES)), device=data.device)
    # One look-up by byte gives both halves.
    codes = torch.arange(256, device=data.device)
    pairs = torch.stack((table[codes & 15], table[codes >> 4]), dim=-1)
    return pairs[data.view(torch.uint8).to(torch.int32)].flatten(-2)


def _fp8_values(data: torch.Tensor) -> torch.Tensor:
    if data.dtype != torch.float8_e4m3fn:
        raise TypeError(f"FP8 data is {data.dtype}: expected torch.float8_e4m3fn")
    return data.to(torch.float32)
