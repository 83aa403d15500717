"""Norm, gated activation and embedding of the reference backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_support import operator

from deepinfer_core.api import EmbeddingRequest, RmsNormRequest, SwigluRequest

EPS = 1e-5


def norm(dtype: str = "float32") -> Any:
    return operator(RmsNormRequest(hidden=48, eps=EPS, dtype=dtype))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return weight.double() * wide / ((wide * wide).sum(-1, keepdim=True) / x.shape[-1] + EPS).sqrt()


@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 2e-6), ("float64", 1e-14), ("bfloat16", 4e-3)])
def test_norm_equals_the_float64_formula(dtype: str, rtol: float) -> None:
    x = random(7, 48).to(getattr(torch, dtype)) * 3
    weight = random(48, seed=1).to(x.dtype)
    result = norm(dtype).run(x, weight)
    assert result.dtype == x.dtype
    torch.testing.assert_close(result.double(), exact_norm(x, weight), rtol=rtol, atol=rtol)


def test_norm_in_bfloat16_rounds_only_the_result() -> None:
    x, weight = random(7, 48).bfloat16(), random(48, seed=1).bfloat16()
    assert torch.equal(norm("bfloat16").run(x, weight), norm().run(x.float(), weight.float()).bfloat16())


def test_norm_takes_any_leading_shape() -> None:
    x, weight = random(3, 4, 48), random(48, seed=1)
    flat = norm().run(x.reshape(12, 48), weight)
    torch.testing.assert_close(norm().run(x, weight).reshape(12, 48), flat)


def test_norm_of_zeros_is_zero() -> None:
    assert torch.equal(norm().run(torch.zeros(2, 48), torch.ones(48)), torch.zeros(2, 48))


def test_norm_add_returns_norm_and_sum() -> None:
    x, residual, weight = random(5, 48), random(5, 48, seed=2), random(48, seed=1)
    before = x.clone()
    expected = x + residual
    normed, total = norm().add(x, residual, weight)
    assert torch.equal(total, expected)
    assert torch.equal(normed, norm().run(expected, weight))
    assert torch.equal(x, before)


def test_norm_of_no_rows() -> None:
    normed, total = norm().add(torch.zeros(0, 48), torch.zeros(0, 48), torch.ones(48))
    assert normed.shape == total.shape == (0, 48)


@pytest.mark.parametrize("limit", [None, 0.5])
def test_swiglu_equals_the_formula(limit: float | None) -> None:
    gate, up = random(6, 10) * 2, random(6, 10, seed=3) * 2
    op = operator(SwigluRequest(width=10, dtype="float32", limit=limit))
    g, u = gate.double(), up.double()
    if limit is not None:
        g, u = g.where(g < limit, limit), u.clamp(-limit, limit)
    expected = g / (1 + torch.exp(-g)) * u
    torch.testing.assert_close(op.run(torch.cat((gate, up), dim=1)).double(), expected, rtol=1e-5, atol=1e-6)


def test_swiglu_limit_leaves_very_negative_gates_alone() -> None:
    op = operator(SwigluRequest(width=1, dtype="float64", limit=1.0))
    gate = torch.tensor([[-3.0, 1.0]], dtype=torch.float64)
    assert op.run(gate).item() == pytest.approx(-3.0 / (1 + torch.e**3))


def test_swiglu_in_bfloat16_rounds_only_the_result() -> None:
    pair = random(6, 20).bfloat16()
    op = operator(SwigluRequest(width=10, dtype="bfloat16"))
    wide = operator(SwigluRequest(width=10, dtype="float32")).run(pair.float())
    assert torch.equal(op.run(pair), wide.bfloat16())


def test_swiglu_of_no_rows() -> None:
    assert operator(SwigluRequest(width=4, dtype="float32")).run(torch.zeros(0, 8)).shape == (0, 4)


def embedding(dtype: str = "float32") -> Any:
    return operator(EmbeddingRequest(vocab_size=9, hidden=4, dtype=dtype, weight_dtype="float32"))


def test_embedding_looks_rows_up() -> None:
    table = random(9, 4)
    op = embedding()
    rows = op.run(torch.tensor([8, 0, 8]), op.prepare(table))
    assert torch.equal(rows, torch.stack((table[8], table[0], table[8])))


def test_embedding_is_kept_in_the_requested_dtype() -> None:
    op = embedding("bfloat16")
    assert torch.equal(op.run(torch.tensor([3]), op.prepare(random(9, 4))), random(9, 4)[3:4].bfloat16())


def test_embedding_of_no_tokens() -> None:
    op = embedding()
    assert op.run(torch.zeros(0, dtype=torch.int64), op.prepare(random(9, 4))).shape == (0, 4)


def test_embedding_refuses_an_id_outside_the_table() -> None:
    op = embedding()
    with pytest.raises(IndexError):
        op.run(torch.tensor([9]), op.prepare(random(9, 4)))
