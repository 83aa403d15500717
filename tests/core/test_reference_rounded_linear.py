"""``gemm.linear`` with inputs rounded to FP8 first."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from reference_support import candidates, operator

from deepinfer_core.api import LinearRequest, QuantiseDequantiseRequest, QuantisedWeight

SEED = random.randrange(2**31)


def request(inner: int, activations: str, **changes: Any) -> LinearRequest:
    fields = {
        "in_features": inner,
        "out_features": 40,
        "dtype": "float32",
        "out_dtype": "float32",
        "weight_dtype": "fp8:e4m3:128x128",
    }
    return LinearRequest(activations=activations, **(fields | changes))


def weight(inner: int, draw: torch.Generator) -> tuple[QuantisedWeight, torch.Tensor]:
    """A packed weight, and its values in float64."""
    data = torch.randn(40, inner, generator=draw).mul(8).to(torch.float8_e4m3fn)
    bits = torch.randint(120, 130, (1, -(-inner // 128)), generator=draw).to(torch.uint8)
    scale = torch.exp2(bits.double() - 127).repeat_interleave(128, 1)[:, :inner]
    packed = QuantisedWeight(format="fp8:e4m3", data=data, scale=bits.view(torch.float8_e8m0fnu), block=(128, 128))
    return packed, data.double() * scale


def check(found: torch.Tensor, x: torch.Tensor, values: torch.Tensor) -> None:
    """Float32 sums of so many products, in any order: their error is of the size of the terms, not of the sum."""
    terms = x.double().abs() @ values.abs().T
    assert ((found.double() - x.double() @ values.T).abs() <= x.shape[1] * 2.0**-24 * terms).all()


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("group", [32, 128])
def test_inputs_are_rounded_as_quantise_dequantise_does(rows: int, group: int) -> None:
    draw = torch.Generator().manual_seed(SEED + rows + group)
    x = torch.randn(rows, 384, generator=draw) * torch.rand(rows, 1, generator=draw).mul(20).exp()
    packed, values = weight(384, draw)
    op = operator(request(384, f"fp8:e4m3:{group}"))
    rounding = operator(
        QuantiseDequantiseRequest(format="fp8:e4m3", width=384, channels=384, group=group, dtype="float32")
    )
    found = op.run(x, op.prepare([packed]))
    check(found, rounding.run(x), values)
    if rows:
        assert not torch.allclose(found.double(), x.double() @ values.T, rtol=1e-4)


def test_a_last_group_may_be_short() -> None:
    draw = torch.Generator().manual_seed(SEED)
    x = torch.randn(3, 200, generator=draw)
    packed, values = weight(200, draw)
    op = operator(request(200, "fp8:e4m3:128"))
    rounding = operator(
        QuantiseDequantiseRequest(format="fp8:e4m3", width=256, channels=256, group=128, dtype="float32")
    )
    rounded = rounding.run(torch.nn.functional.pad(x, (0, 56)))[:, :200]
    found = op.run(x, op.prepare([packed]))
    check(found, rounded, values)


def test_only_providers_that_round_are_asked() -> None:
    rounded = request(256, "fp8:e4m3:128")
    assert "rounded_activations" in rounded.demands
    assert [p.name for p in candidates(rounded)] == ["linear"]
    assert not request(256, "").demands


@pytest.mark.parametrize("wrong", ["fp8", "fp8:e5m2:128", "fp8:e4m3:", "fp8:e4m3:0", "128"])
def test_what_is_no_format_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="activations="):
        request(256, wrong)
