"""Quantise-dequantise: the grids, the ties, the scales, the rotation before it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from reference_support import operator

from deepinfer_core.api import QdqFormat, QuantiseDequantiseRequest
from deepinfer_core.reference.quantise import hadamard, power_of_two_above

FP4_GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP8_GRID = sorted(
    {m * 2.0**-9 for m in range(8)} | {(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)} - {480.0}
)


def build(**changes: Any) -> Any:
    fields: dict[str, Any] = {"format": "fp4:e2m1", "width": 32, "channels": 32, "group": 32, "dtype": "float32"}
    return operator(QuantiseDequantiseRequest(**(fields | changes)))


def nearest(grid: list[float], x: float) -> float:
    """Nearest magnitude; of two equally near, the one at an even place of the grid."""
    best = min(range(len(grid)), key=lambda i: (abs(grid[i] - abs(x)), i % 2))
    return math.copysign(grid[best], x)


def expected(group: list[float], grid: list[float], floor: float) -> list[float]:
    largest = grid[-1]
    maximum = max(max(abs(x) for x in group), floor)
    scale = 2.0 ** math.ceil(math.log2(maximum / largest))
    return [nearest(grid, max(-largest, min(largest, x / scale))) * scale for x in group]


@pytest.mark.parametrize(
    ("format", "grid", "floor", "group"), [("fp4:e2m1", FP4_GRID, 6 * 2.0**-126, 32), ("fp8:e4m3", FP8_GRID, 1e-4, 64)]
)
@pytest.mark.parametrize("size", [1e-6, 0.3, 1.0, 7e4])
def test_against_the_grid(format: str, grid: list[float], floor: float, group: int, size: float) -> None:
    x = torch.randn(5, 2 * group, generator=torch.Generator().manual_seed(1)) * size
    found = build(format=format, width=2 * group, channels=2 * group, group=group).run(x)
    for row in range(5):
        for start in (0, group):
            wanted = expected(x[row, start : start + group].tolist(), grid, floor)
            assert found[row, start : start + group].tolist() == pytest.approx(wanted, rel=1e-7, abs=0)


def test_fp4_ties_go_to_the_even_code() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    x = torch.tensor([*ties, *(-t for t in ties), *([0.0] * 16)])
    wanted = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert build().run(x).tolist() == [*wanted, *(-w for w in wanted), *([0.0] * 16)]


def test_scales_are_the_next_power_of_two_exactly() -> None:
    x = torch.tensor([1.0, 1.0000001, 0.9999999, 3.0, 2.0**-100, 2.0**100])
    assert power_of_two_above(x).tolist() == [1.0, 2.0, 1.0, 4.0, 2.0**-100, 2.0**100]


def test_zero_stays_zero() -> None:
    for format, group in (("fp4:e2m1", 32), ("fp8:e4m3", 16)):
        assert torch.equal(build(format=format, group=group).run(torch.zeros(2, 32)), torch.zeros(2, 32))


def test_only_the_first_channels_are_rounded() -> None:
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    found = build(width=40).run(x)
    assert torch.equal(found[:, 32:], x[:, 32:])
    assert not torch.equal(found[:, :32], x[:, :32])


def test_rounding_twice_changes_nothing() -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    op = build(format="fp8:e4m3", width=64, channels=64, group=64)
    assert torch.equal(op.run(op.run(x)), op.run(x))


def test_the_hadamard_matrix_is_sylvesters_and_orthonormal() -> None:
    matrix = hadamard(16, torch.device("cpu")) * 4
    for i in range(16):
        for j in range(16):
            assert matrix[i, j] == (-1) ** (i & j).bit_count()
    assert torch.allclose(matrix @ matrix / 16, torch.eye(16))


def test_the_rotation_comes_before_the_rounding() -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    rotated = x @ hadamard(32, torch.device("cpu"))
    assert torch.equal(build(hadamard=True).run(x), build().run(rotated))


def test_products_of_rotated_vectors_are_those_of_the_vectors() -> None:
    a, b = torch.randn(2, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    matrix = hadamard(32, torch.device("cpu")).double()
    assert float((a @ matrix) @ (b @ matrix)) == pytest.approx(float(a @ b), rel=1e-6)


def test_16_bit_values_keep_their_dtype() -> None:
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = build(dtype="bfloat16").run(x)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.float(), build().run(x.float()))


def test_no_rows_and_wrong_groups() -> None:
    assert build().run(torch.zeros(0, 32)).shape == (0, 32)
    with pytest.raises(ValueError, match="channels=33 is no multiple of group=32"):
        build(width=64, channels=33)
    with pytest.raises(ValueError, match="width=24 is no power of two"):
        build(width=24, channels=24, group=8, hadamard=True)


@pytest.mark.parametrize("format", ["fp8:e4m3", "fp4:e2m1"])
def test_no_rows_keep_their_width(format: QdqFormat) -> None:
    request = QuantiseDequantiseRequest(format=format, width=96, channels=64, group=32, dtype="float32")
    assert operator(request).run(torch.zeros(0, 96)).shape == (0, 96)


@pytest.mark.parametrize("format", ["fp8:e4m3", "fp4:e2m1"])
def test_a_group_with_a_nan_is_nan_and_no_other(format: QdqFormat) -> None:
    request = QuantiseDequantiseRequest(format=format, width=96, channels=64, group=32, dtype="float32")
    x = torch.ones(2, 96)
    x[1, 40] = float("nan")
    broken = operator(request).run(x).isnan()
    assert broken[1, 32:64].all()
    assert int(broken.sum()) == 32
