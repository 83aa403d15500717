"""``gemm.linear`` of the reference backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_support import operator

from deepinfer_core.api import LinearRequest


def linear(dtype: str = "float32", out_dtype: str | None = None, bias: bool = False) -> Any:
    return operator(
        LinearRequest(
            in_features=64,
            out_features=24,
            dtype=dtype,
            out_dtype=out_dtype or dtype,
            weight_dtype="float32",
            bias=bias,
        )
    )


def parts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 64, generator=generator) for rows in (16, 4, 4)]


def x(rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(2))


def test_parts_are_stacked_along_the_output() -> None:
    op = linear()
    packed = op.prepare(parts())
    expected = torch.cat([x().double() @ part.double().T for part in parts()], dim=1)
    torch.testing.assert_close(op.run(x(), packed).double(), expected, rtol=1e-5, atol=1e-5)


def test_float64_is_exact_to_float64() -> None:
    op = linear("float64")
    packed = op.prepare(parts())
    expected = x().double() @ torch.cat(parts()).double().T
    torch.testing.assert_close(op.run(x().double(), packed), expected, rtol=1e-14, atol=1e-13)


def test_bias_is_added() -> None:
    op = linear(bias=True)
    bias = torch.arange(24.0)
    without = op.run(x(), op.prepare(parts()))
    torch.testing.assert_close(op.run(x(), op.prepare(parts(), bias)), without + bias)


def test_bfloat16_rounds_only_the_result() -> None:
    op = linear("bfloat16")
    weight = torch.cat(parts()).bfloat16()
    exact = x().bfloat16().double() @ weight.double().T
    result = op.run(x().bfloat16(), op.prepare([weight]))
    assert result.dtype == torch.bfloat16
    # One rounding to 8 bits of mantissa; the float32 sum before it may shift the rounding point slightly.
    assert ((result.double() - exact).abs() <= exact.abs() * 2.0**-8 + 1e-5).all()


def test_out_dtype_may_be_wider() -> None:
    op = linear("bfloat16", "float32")
    weight = torch.cat(parts()).bfloat16()
    result = op.run(x().bfloat16(), op.prepare([weight]))
    assert result.dtype == torch.float32
    expected = x().bfloat16().double() @ weight.double().T
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


def test_preparing_converts_to_the_compute_dtype() -> None:
    packed = linear("bfloat16").prepare(parts())
    assert packed.weight.dtype == torch.bfloat16
    assert torch.equal(packed.weight, torch.cat(parts()).bfloat16())


def test_zero_rows() -> None:
    op = linear()
    assert op.run(x(0), op.prepare(parts())).shape == (0, 24)


def test_a_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(20, 64\).*\(24, 64\)"):
        linear().prepare(parts()[:2])
