"""FP8 and FP4 weights decode bit for bit: every code, every scale."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer_core.api import QuantisedWeight, quantised_name
from deepinfer_core.reference.fp_formats import dequantise, e2m1_values, e8m0_values


def e4m3(byte: int) -> float:
    """One FP8 number by its definition: sign, four exponent bits (bias 7), three mantissa bits; S1111111 is NaN."""
    sign, exponent, mantissa = -1 if byte & 128 else 1, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def scales(*bytes_: int) -> torch.Tensor:
    return torch.tensor(bytes_, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def fp8(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> QuantisedWeight:
    return QuantisedWeight(
        format="fp8:e4m3", data=codes.view(torch.float8_e4m3fn), scale=scale.view(torch.float8_e8m0fnu), block=block
    )


def test_every_scale_byte() -> None:
    found = e8m0_values(scales(*range(256)))
    assert found[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert found[255].isnan()


def test_every_fp8_code_under_several_scales() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    for byte in (0, 1, 100, 127, 140, 239):
        weight = fp8(codes, torch.tensor([[byte, byte]], dtype=torch.uint8), (128, 128))
        found = dequantise(weight, torch.float64)[0].tolist()
        for code, value in enumerate(found):
            wanted = e4m3(code) * 2.0 ** (byte - 127)
            assert value == wanted or (math.isnan(value) and math.isnan(wanted)), (code, byte)


def test_every_pair_of_fp4_codes() -> None:
    grid = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    grid += [-value for value in grid]
    codes = torch.arange(256, dtype=torch.uint8).view(torch.int8).view(256, 1)
    assert e2m1_values(codes).tolist() == [[grid[byte & 15], grid[byte >> 4]] for byte in range(256)]


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (256, 384), (130, 128), (128, 200), (5, 7), (1, 129)])
def test_each_element_takes_the_scale_of_its_block(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 120, (rows, columns), generator=generator, dtype=torch.uint8)
    shape = (-(-rows // 128), -(-columns // 128))
    scale = torch.randint(110, 140, shape, generator=generator, dtype=torch.uint8)
    found = dequantise(fp8(codes, scale, (128, 128)))
    assert found.shape == (rows, columns)
    for i, j in ((0, 0), (rows - 1, columns - 1), (rows // 2, columns // 3), (0, columns - 1), (rows - 1, 0)):
        wanted = e4m3(int(codes[i, j])) * 2.0 ** (int(scale[i // 128, j // 128]) - 127)
        assert float(found[i, j]) == wanted


def test_fp4_groups_of_32() -> None:
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(-128, 128, (3, 48), generator=generator, dtype=torch.int8)
    scale = torch.randint(110, 140, (3, 3), generator=generator, dtype=torch.uint8)
    weight = QuantisedWeight(format="fp4:e2m1", data=data, scale=scale.view(torch.float8_e8m0fnu), block=(1, 32))
    assert weight.shape == (3, 96)
    values, found = e2m1_values(data), dequantise(weight)
    for i in range(3):
        for j in range(96):
            assert float(found[i, j]) == float(values[i, j]) * 2.0 ** (int(scale[i, j // 32]) - 127)


def test_a_nan_scale_shows() -> None:
    weight = fp8(torch.full((1, 4), 8, dtype=torch.uint8), torch.tensor([[255]], dtype=torch.uint8), (128, 128))
    assert dequantise(weight).isnan().all()


def test_bytes_are_never_taken_for_numbers() -> None:
    raw = QuantisedWeight(format="fp8:e4m3", data=torch.zeros(1, 4), scale=scales(127).view(1, 1), block=(128, 128))
    with pytest.raises(TypeError, match=r"FP8 data is torch\.float32"):
        dequantise(raw)
    with pytest.raises(TypeError, match=r"scales are torch\.uint8: expected torch\.float8_e8m0fnu"):
        e8m0_values(torch.tensor([127], dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"FP4 data is torch\.float32"):
        e2m1_values(torch.zeros(2, 2))


def test_scales_of_another_shape_are_refused() -> None:
    weight = fp8(torch.zeros(256, 128, dtype=torch.uint8), torch.full((1, 1), 127, dtype=torch.uint8), (128, 128))
    with pytest.raises(ValueError, match=r"expected \(2, 1\)"):
        dequantise(weight)


def test_the_name_requests_use() -> None:
    weight = fp8(torch.zeros(1, 4, dtype=torch.uint8), torch.full((1, 1), 127, dtype=torch.uint8), (32, 32))
    assert weight.weight_dtype == quantised_name("fp8:e4m3", (32, 32)) == "fp8:e4m3:32x32"
