"""Paged attention of models of many shapes, drawn at random, against a formula in float64.

Heads that share a key are often no power of two (five, seven, nine; all heads of a model with one key head), and a
tile of theirs has members that are nobody's. The cache holds NaN wherever no token of a context lies.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from gpu_support import DTYPES, ON_GPU, here, operator
from reference_support import layout

from deepinfer_core.api import PagedAttentionRequest

TOLERANCE = {"float32": 3e-5, "bfloat16": 2e-2, "float16": 4e-3}
HEADS = ((1, 1), (3, 1), (5, 5), (10, 2), (14, 2), (9, 1), (8, 1), (16, 1), (17, 1), (33, 1), (71, 1))
"""Query and key heads."""
ATTEMPTS = 3 if ON_GPU else 1


def drawn(source: random.Random, q_heads: int, kv_heads: int, dtype: str, invariant: bool) -> PagedAttentionRequest:
    dim = source.choice([16, 32, 64, 128, 256])
    return PagedAttentionRequest(
        cache_group="full",
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=dim,
        dtype=dtype,
        cache_dtype=source.choice([dtype, dtype, "float8_e4m3fn"]),
        scale=source.choice([1.0, 0.3, 0.0]) * dim**-0.5,
        block_size=source.choice([1, 7, 16, 32, 48, 64, 128]),
        window=source.choice([None, None, source.randrange(1, 90)]),
        softcap=source.choice([None, None, 3.0]),
        sinks=source.random() < 0.3,
        demands=frozenset({"kv_layout:paged", "batch_invariant"} if invariant else {"kv_layout:paged"}),
    )


def steps(source: random.Random) -> tuple[list[int], list[int]]:
    """Rows and contexts of some requests: rows that decode, drafts, prompts, and all of them together."""
    kinds = source.choice([[1], [1, 1, 1, 1], [1, 3, 6], [1, 2, 40, 0]])
    return kinds, [rows + source.choice([0, 1, source.randrange(200)]) for rows in kinds]


def formula(
    request: PagedAttentionRequest,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Of one request: ``query [T, q_heads, D]``, ``keys`` and ``values [context, kv_heads, D]``, float64."""
    group = request.q_heads // request.kv_heads
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("thd,chd->htc", query, keys) * request.scale
    if request.softcap is not None:
        scores = request.softcap * torch.tanh(scores / request.softcap)
    behind = torch.arange(len(keys) - len(query), len(keys))[:, None] - torch.arange(len(keys))[None, :]
    hidden = (behind < 0) | (behind >= (len(keys) + 1 if request.window is None else request.window))
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(query), 1)), 2)
    weights = scores.softmax(2)[:, :, : len(keys)]
    return torch.einsum("htc,chd->thd", weights, values)


def compare(source: random.Random, request: PagedAttentionRequest) -> None:
    rows, contexts = steps(source)
    draw = torch.Generator().manual_seed(source.getrandbits(60))
    dtype: torch.dtype = getattr(torch, request.dtype)
    step, blocks = layout(rows, contexts, request.block_size)
    shape = (blocks * request.block_size, request.kv_heads, request.head_dim)
    kept: torch.dtype = getattr(torch, request.cache_dtype)
    cache = {name: torch.full(shape, float("nan")).to(kept) for name in ("key", "value")}
    # Queries are a view of the merged product, whose other columns are not attention's.
    merged = torch.randn(sum(rows), request.q_heads + 2, request.head_dim, generator=draw).to(dtype)
    query = merged[:, 1:-1]
    sinks = torch.randn(request.q_heads, generator=draw) * 2 if request.sinks else None
    expected, first, read = [], 0, {}
    for number, (count, context) in enumerate(zip(rows, contexts, strict=True)):
        token = torch.arange(context)
        place = step.block_table[number].long()[token // request.block_size] * request.block_size
        place += token % request.block_size
        for name in ("key", "value"):
            fresh = torch.randn(context, *shape[1:], generator=draw).to(kept)
            bits = torch.uint8 if fresh.element_size() == 1 else kept  # torch moves no elements in FP8
            cache[name].view(bits)[place] = fresh.view(bits)
            read[name] = fresh.double()
        expected.append(
            formula(
                request,
                query[first : first + count].double(),
                read["key"],
                read["value"],
                None if sinks is None else sinks.double(),
            )
        )
        first += count
    paged: dict[str, Any] = {
        name: here(rows_of.view(blocks, request.block_size, *shape[1:])) for name, rows_of in cache.items()
    }
    op, where = operator(request), here(step)
    found = op.run(here(merged)[:, 1:-1], paged, op.plan(where), None if sinks is None else here(sinks))
    tolerance = TOLERANCE[request.dtype]
    torch.testing.assert_close(
        found.cpu().double(),
        torch.cat(expected),
        rtol=tolerance,
        atol=tolerance,
        msg=lambda said: f"{request}, rows {rows}, contexts {contexts}: {said}",
    )


@pytest.mark.parametrize("dtype", dict.fromkeys((*DTYPES, "float16")))
@pytest.mark.parametrize(("q_heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("invariant", [False, True], ids=["default", "batch_invariant"])
def test_models_of_any_shape(q_heads: int, kv_heads: int, dtype: str, invariant: bool) -> None:
    source = random.Random(random.getrandbits(60))
    for _ in range(ATTEMPTS):
        compare(source, drawn(source, q_heads, kv_heads, dtype, invariant))
