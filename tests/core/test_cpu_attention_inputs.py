"""The host's attention inputs against the reference's norm, rotary embedding and cache write, one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpu_support import normal, operator
from reference_support import layout
from reference_support import operator as reference

from deepinfer_core.api import AttentionInputsRequest, RmsNormRequest, RopeRequest, WriteKVRequest

BLOCK, DIM = 4, 16
STEPS = {"mixed": ([1, 3, 9], [9, 3, 18]), "one row": ([1], [6]), "none": ([], [])}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("eps", [None, 1e-5])
@pytest.mark.parametrize("kept", ["paged", "transposed_keys"])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(6, 2), (3, 3)])
def test_equals_its_parts(step: str, eps: float | None, kept: str, q_heads: int, kv_heads: int) -> None:
    where, blocks = layout(*STEPS[step], BLOCK)
    rows = len(where.positions)
    turn: dict[str, Any] = {"theta": 1e4, "max_positions": 64, "dtype": "float32"}
    shape: dict[str, Any] = {
        "cache_group": "full",
        "kv_heads": kv_heads,
        "head_dim": DIM,
        "block_size": BLOCK,
        "cache_dtype": "float32",
    }
    op = operator(AttentionInputsRequest(q_heads=q_heads, norm_eps=eps, demands={f"kv_layout:{kept}"}, **shape, **turn))
    plan = op.plan(where)
    caches = {name: torch.full((blocks, BLOCK, kv_heads, DIM), float("nan")) for name in ("key", "value")}
    for layer in range(2):
        qkv = normal(rows, (q_heads + 2 * kv_heads) * DIM, seed=3 + layer)
        norms = [None, None] if eps is None else [normal(DIM, seed=s + layer) for s in (11, 17)]
        cache = {name: entry.clone() for name, entry in caches.items()}
        expected = _parts(qkv, cache, where, norms, eps, (q_heads, kv_heads), turn, shape)
        mine = {name: entry.clone() for name, entry in caches.items()}
        if kept == "transposed_keys":
            mine = {"key": mine["key"].permute(0, 2, 3, 1).clone(), "value": mine["value"].transpose(1, 2).clone()}
        before = qkv.clone()
        found = op.run(qkv, mine, plan, *norms)
        if kept == "transposed_keys":
            mine = {"key": mine["key"].permute(0, 3, 1, 2), "value": mine["value"].transpose(1, 2)}
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
        assert torch.equal(qkv, before)
        for name, entry in cache.items():
            torch.testing.assert_close(mine[name], entry, rtol=2e-6, atol=2e-6, equal_nan=True)


def _parts(
    qkv: torch.Tensor,
    cache: dict[str, torch.Tensor],
    where: Any,
    norms: Any,
    eps: float | None,
    counts: tuple[int, int],
    turn: dict[str, Any],
    shape: dict[str, Any],
) -> torch.Tensor:
    queries, keys = counts
    query, key, value = qkv.view(-1, queries + 2 * keys, DIM).split((queries, keys, keys), dim=1)
    if eps is not None:
        norm = reference(RmsNormRequest(hidden=DIM, eps=eps, dtype="float32"))
        query, key = norm.run(query, norms[0]), norm.run(key, norms[1])
    rope = reference(RopeRequest(head_dim=DIM, rotary_dim=DIM, **turn))
    plan = rope.plan(where.positions)
    query, key = rope.run(query, plan), rope.run(key, plan)
    reference(WriteKVRequest(dtype="float32", **shape)).run(key, value, cache, where)
    return query
