"""Batched and grouped linear layers, plain and packed, against one product at a time."""

from __future__ import annotations

import pytest
import torch
from reference_support import operator

from deepinfer_core.api import BatchedLinearRequest, GroupedLinearRequest, LinearRequest, QuantisedWeight

SHAPE = {"in_features": 32, "out_features": 6, "dtype": "float32", "out_dtype": "float32", "weight_dtype": "float32"}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fp4(rows: int, columns: int, seed: int) -> QuantisedWeight:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(-128, 128, (rows, columns // 2), generator=generator, dtype=torch.int8)
    scale = torch.randint(120, 130, (rows, columns // 32), generator=generator, dtype=torch.uint8)
    return QuantisedWeight(format="fp4:e2m1", data=data, scale=scale.view(torch.float8_e8m0fnu), block=(1, 32))


def plain(weight: QuantisedWeight) -> torch.Tensor:
    """Decoded by looking at one element at a time."""
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    rows, columns = weight.shape
    scales = weight.scale.view(torch.uint8)
    out = torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            byte = int(weight.data[i, j // 2]) & 255
            code = byte >> 4 if j % 2 else byte & 15
            sign = -1 if code & 8 else 1
            out[i, j] = sign * magnitudes[code & 7] * 2.0 ** (int(scales[i, j // 32]) - 127)
    return out


def test_batched() -> None:
    op = operator(BatchedLinearRequest(groups=3, **SHAPE))
    first, second = normal(12, 32, seed=1), normal(6, 32, seed=2)
    x = normal(5, 3, 32)
    found = op.run(x, op.prepare([first, second]))
    whole = torch.cat((first, second)).view(3, 6, 32)
    assert found.shape == (5, 3, 6)
    for group in range(3):
        assert torch.allclose(found[:, group], x[:, group] @ whole[group].T, atol=1e-5)


def test_batched_without_rows() -> None:
    op = operator(BatchedLinearRequest(groups=3, **SHAPE))
    assert op.run(torch.zeros(0, 3, 32), op.prepare([normal(18, 32)])).shape == (0, 3, 6)


def test_grouped_with_an_empty_group() -> None:
    op = operator(GroupedLinearRequest(groups=4, **SHAPE))
    weights = [[normal(2, 32, seed=g), normal(4, 32, seed=g + 9)] for g in range(4)]
    x, offsets = normal(7, 32, seed=5), torch.tensor([0, 3, 3, 6, 7])
    found = op.run(x, offsets, op.prepare(weights))
    for row in range(7):
        group = int((offsets[1:] <= row).sum())
        assert torch.allclose(found[row], torch.cat(weights[group]) @ x[row], atol=1e-5)


def test_grouped_without_rows() -> None:
    op = operator(GroupedLinearRequest(groups=2, **SHAPE))
    packed = op.prepare([[normal(6, 32)], [normal(6, 32)]])
    assert op.run(torch.zeros(0, 32), torch.zeros(3, dtype=torch.int64), packed).shape == (0, 6)


def test_grouped_keeps_packed_weights_packed() -> None:
    op = operator(GroupedLinearRequest(groups=2, **(SHAPE | {"weight_dtype": "fp4:e2m1:1x32"})))
    weights = [[fp4(2, 32, 1), fp4(4, 32, 2)], [fp4(2, 32, 3), fp4(4, 32, 4)]]
    packed = op.prepare(weights)
    assert packed[1][0].data is weights[1][0].data
    x = normal(5, 32)
    found = op.run(x, torch.tensor([0, 2, 5]), packed)
    for row in range(5):
        parts = weights[0 if row < 2 else 1]
        assert torch.allclose(found[row], torch.cat([plain(p) for p in parts]) @ x[row], rtol=1e-5, atol=1e-4)


def test_linear_decodes_packed_parts_exactly() -> None:
    op = operator(LinearRequest(**(SHAPE | {"weight_dtype": "fp4:e2m1:1x32"})))
    parts = [fp4(2, 32, 1), fp4(4, 32, 2)]
    assert torch.equal(op.prepare(parts).weight, torch.cat([plain(p) for p in parts]))


@pytest.mark.parametrize("groups", [1, 3])
def test_a_wrong_number_of_groups_is_refused(groups: int) -> None:
    op = operator(GroupedLinearRequest(groups=2, **SHAPE))
    with pytest.raises(ValueError, match=f"{groups} groups of weights; the request says 2"):
        op.prepare([[normal(6, 32)]] * groups)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"group 0: weight has shape \(5, 32\)"):
        operator(GroupedLinearRequest(groups=1, **SHAPE)).prepare([[normal(5, 32)]])
    with pytest.raises(ValueError, match="batched weight has shape"):
        operator(BatchedLinearRequest(groups=2, **SHAPE)).prepare([normal(6, 32)])
