"""Norm, rotary embedding, activation, embedding and cache writes against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_support import DEVICE, DTYPES, close, here, operator
from reference_support import layout
from reference_support import operator as reference

from deepinfer_core.api import (
    EmbeddingRequest,
    OpRequest,
    RmsNormRequest,
    RopeRequest,
    SwigluRequest,
    WriteKVRequest,
)


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed + 17 * len(shape) + shape[-1])
    return torch.randn(shape, generator=made).to(getattr(torch, dtype))


def both(request: OpRequest) -> tuple[Any, Any]:
    return operator(request), reference(request)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (5, 96), (3, 576), (2, 4100), (37, 128), (0, 64)])
def test_norm(rows: int, hidden: int, dtype: str) -> None:
    ours, theirs = both(RmsNormRequest(hidden=hidden, eps=1e-6, dtype=dtype))
    x, residual, weight = (normal(rows, hidden, dtype=dtype, seed=s) for s in range(3))
    weight = weight[0] if rows else normal(hidden, dtype=dtype)
    close(ours.run(here(x), here(weight)), theirs.run(x, weight), dtype)
    normed, total = ours.add(here(x), here(residual).clone(), here(weight))
    expected, expected_total = theirs.add(x, residual, weight)
    close(normed, expected, dtype)
    assert torch.equal(total.cpu(), expected_total)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads_that_lie_apart(dtype: str) -> None:
    """Queries are a view of the merged product."""
    ours, theirs = both(RmsNormRequest(hidden=32, eps=1e-5, dtype=dtype))
    qkv, weight = normal(5, 8, 32, dtype=dtype), normal(32, dtype=dtype)
    close(ours.run(here(qkv)[:, 4:6], here(weight)), theirs.run(qkv[:, 4:6], weight), dtype)


SCALINGS: list[dict[str, Any]] = [
    {},
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s.get("rope_type", "default"))
@pytest.mark.parametrize(("heads", "dim", "rotary"), [(4, 32, 32), (3, 64, 64), (17, 24, 16)])
def test_rope(heads: int, dim: int, rotary: int, scaling: dict[str, Any], dtype: str) -> None:
    request = RopeRequest(head_dim=dim, rotary_dim=rotary, theta=1e4, dtype=dtype, max_positions=300, scaling=scaling)
    ours, theirs = both(request)
    positions = torch.tensor([0, 1, 299, 7, 123])
    x = normal(5, heads + 2, dim, dtype=dtype)
    for inverse in (False, True):
        found = ours.run(here(x)[:, 1:-1], ours.plan(here(positions)), inverse)
        close(found, theirs.run(x[:, 1:-1], theirs.plan(positions), inverse), dtype)
    assert ours.run(here(x)[:0], ours.plan(here(positions[:0]))).shape == (0, heads + 2, dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "limit"), [(1, 48, None), (7, 1500, None), (3, 64, 0.5), (0, 8, None)])
def test_swiglu(rows: int, width: int, limit: float | None, dtype: str) -> None:
    ours, theirs = both(SwigluRequest(width=width, dtype=dtype, limit=limit))
    x = 3 * normal(rows, 2 * width, dtype=dtype)
    close(ours.run(here(x)), theirs.run(x), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(dtype: str) -> None:
    ours, theirs = both(EmbeddingRequest(vocab_size=50, hidden=1100, dtype=dtype, weight_dtype="float32"))
    weight, ids = normal(50, 1100), torch.tensor([3, 49, 0, 3])
    found = ours.run(here(ids), ours.prepare(weight))
    assert torch.equal(found.cpu(), theirs.run(ids, theirs.prepare(weight)))
    assert ours.run(here(ids[:0]), ours.prepare(weight)).shape == (0, 1100)
    column = here(torch.stack((ids, ids.new_full((4,), 7)), 1))[:, 0]  # ids need not lie side by side
    assert torch.equal(ours.run(column, ours.prepare(weight)).cpu(), theirs.run(ids, theirs.prepare(weight)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "dim"), [(2, 16), (3, 64), (8, 128)])
def test_write_kv(kv_heads: int, dim: int, dtype: str) -> None:
    request = WriteKVRequest(
        cache_group="full", kv_heads=kv_heads, head_dim=dim, dtype=dtype, cache_dtype=dtype, block_size=4
    )
    ours, theirs = both(request)
    where, blocks = layout([1, 3, 5], [4, 9, 5], 4)
    merged = normal(9, 2 * kv_heads, dim, dtype=dtype)
    key, value = merged[:, :kv_heads], merged[:, kv_heads:]
    expected = {name: torch.full((blocks, 4, kv_heads, dim), 7.0, dtype=key.dtype) for name in ("key", "value")}
    found = here({name: tensor.clone() for name, tensor in expected.items()})
    theirs.run(key, value, expected, where)
    moved = here(merged)
    ours.run(moved[:, :kv_heads], moved[:, kv_heads:], found, here(where))
    for name in ("key", "value"):
        assert torch.equal(found[name].cpu(), expected[name])
    assert found["key"].device.type == DEVICE.type
