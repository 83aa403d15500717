"""A23: an all-zero FP8 block, a zero activation row, blocks of 1e-30 and of 1e4."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from v4.released import fp8_pack

from deepinfer_core.api import QuantiseDequantiseRequest, QuantisedWeight
from deepinfer_core.reference.fp_formats import dequantise
from deepinfer_core.reference.quantise import QuantiseDequantise

RELATIVE = 2.0**-4
"""Half a step of three mantissa bits."""


def packed(weight: torch.Tensor) -> QuantisedWeight:
    data, scale = fp8_pack(weight)
    return QuantisedWeight(format="fp8:e4m3", data=data, scale=scale, block=(128, 128))


def test_zero_blocks_decode_to_zero_and_scales_are_finite() -> None:
    weight = torch.zeros(256, 384)
    weight[128:, 128:256] = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    stored = packed(weight)
    assert stored.scale.float().isfinite().all()
    found = dequantise(stored)
    assert found.isfinite().all()
    zero = weight == 0
    assert torch.equal(found[zero], torch.zeros(int(zero.sum())))
    step = float(weight.abs().max()) * 2.0**-9
    assert ((found - weight).abs() <= weight.abs() * RELATIVE + step).all()


@pytest.mark.parametrize("byte", [0, 1, 127, 254])
def test_zeros_decode_to_zero_under_every_finite_scale(byte: int) -> None:
    scale = torch.full((1, 1), byte, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    stored = QuantisedWeight(
        format="fp8:e4m3", data=torch.zeros(128, 128).to(torch.float8_e4m3fn), scale=scale, block=(128, 128)
    )
    assert torch.equal(dequantise(stored), torch.zeros(128, 128))


def rounded(x: torch.Tensor) -> Any:
    request = QuantiseDequantiseRequest(format="fp8:e4m3", width=128, channels=128, group=64, dtype="float32")
    context: Any = type("Context", (), {"device": torch.device("cpu")})
    return QuantiseDequantise(request, context).run(x)


def test_a_zero_activation_row_stays_zero() -> None:
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    x[1] = 0
    found = rounded(x)
    assert torch.equal(found[1], torch.zeros(128))
    assert found.isfinite().all()


@pytest.mark.parametrize("size", [1e-30, 1e-4, 1.0, 1e4, 3e38])
def test_sizes(size: float) -> None:
    x = torch.rand(4, 128, generator=torch.Generator().manual_seed(0)) * size
    found = rounded(x)
    assert found.isfinite().all()
    floor = max(size, 1e-4) * 2.0**-8
    assert ((found - x).abs() <= x * RELATIVE + floor).all()


def test_nothing_saturates_at_the_edge_of_a_power_of_two() -> None:
    """448 * 2^k is the largest value under its scale; the next number needs the next scale."""
    for value in (448.0, 448.0 * 2**10, 449.0, 300.0):
        row = torch.zeros(1, 128)
        row[0, 0] = value
        assert abs(float(rounded(row)[0, 0]) - value) <= value * RELATIVE
