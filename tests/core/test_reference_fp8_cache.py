"""Keys and values kept in FP8: what is written, and how far attention may be off, from the format's definition."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from reference_support import layout, operator

from deepinfer_core.api import PagedAttentionRequest, WriteKVRequest

SEED = random.randrange(2**31)
BLOCK, Q_HEADS, KV_HEADS, DIM = 4, 6, 2, 16
KEPT = torch.float8_e4m3fn
SHAPE: dict[str, Any] = {"cache_group": "full", "kv_heads": KV_HEADS, "head_dim": DIM, "block_size": BLOCK}


def grid() -> torch.Tensor:
    """Every finite number of e4m3, ascending, from its definition: sign, four exponent bits of bias 7, three others."""
    positive = [m / 8 * 2.0**-6 for m in range(8)]
    positive += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]  # the last would be NaN
    return torch.tensor([-value for value in positive[:0:-1]] + positive, dtype=torch.float64)


def nearest(x: torch.Tensor) -> torch.Tensor:
    """The nearest number of the grid, ties to the even one, past its ends the ends."""
    points = grid()
    x = x.double().clamp(points[0], points[-1])
    high = torch.searchsorted(points, x.contiguous()).clamp(1, len(points) - 1)
    below, above = points[high - 1], points[high]
    even = torch.where((high - 1) % 2 == (len(points) // 2) % 2, below, above)  # counted from zero outwards
    return torch.where(x - below < above - x, below, torch.where(x - below > above - x, above, even))


def written(key: torch.Tensor, value: torch.Tensor, contexts: list[int]) -> tuple[dict[str, torch.Tensor], Any]:
    where, blocks = layout(contexts, contexts, BLOCK, seed=SEED)
    dtype = str(key.dtype).removeprefix("torch.")
    cache = {n: torch.full((blocks, BLOCK, KV_HEADS, DIM), 7.0).to(KEPT) for n in ("key", "value")}
    op = operator(WriteKVRequest(dtype=dtype, cache_dtype="float8_e4m3fn", **SHAPE))
    op.run(key, value, cache, where)
    return cache, where


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_rows_are_the_nearest_of_the_format(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(SEED)
    key, value = (
        torch.randn(9, KV_HEADS, DIM, generator=draw) * 10.0 ** (torch.arange(9) - 5.0)[:, None, None] for _ in range(2)
    )
    ties = (grid()[1:] + grid()[:-1]) / 2
    key.view(-1)[: len(ties)] = ties.to(torch.float32)[torch.randperm(len(ties), generator=draw)]
    key, value = key.to(dtype), value.to(dtype)
    cache, where = written(key, value, [9])
    for name, exact in (("key", key), ("value", value)):
        found = cache[name].to(torch.float64).view(-1, KV_HEADS, DIM)[where.slot_mapping]
        assert torch.equal(found, nearest(exact))
    touched = torch.zeros(cache["key"].shape[0] * BLOCK, dtype=torch.bool)
    touched[where.slot_mapping] = True
    assert bool((cache["key"].to(torch.float32).view(-1, KV_HEADS, DIM)[~touched] == 7.0).all())


def test_the_largest_is_kept_and_nan_stays_nan() -> None:
    key = torch.zeros(1, KV_HEADS, DIM)
    key[0, 0, :4] = torch.tensor([1e30, -1e30, float("inf"), float("nan")])
    cache, where = written(key, key, [1])
    row = cache["key"].to(torch.float32).view(-1, KV_HEADS, DIM)[where.slot_mapping][0, 0]
    assert row[:3].tolist() == [448.0, -448.0, 448.0]
    assert bool(row[3].isnan())
    assert bool((row[4:] == 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_off_by_no_more_than_the_formats_rounding(dtype: torch.dtype) -> None:
    """A key is off by a sixteenth of itself at most, or by 2^-10 where it is small; so are values."""
    draw = torch.Generator().manual_seed(SEED + 1)
    contexts = [1, 13, 30]
    total = sum(contexts)
    key, value = (torch.randn(total, KV_HEADS, DIM, generator=draw).to(dtype) for _ in range(2))
    query = torch.randn(total, Q_HEADS, DIM, generator=draw).to(dtype)
    cache, where = written(key, value, contexts)
    plain = {n: torch.zeros(cache[n].shape, dtype=torch.float64) for n in cache}
    for name, exact in (("key", key), ("value", value)):
        plain[name].view(-1, KV_HEADS, DIM)[where.slot_mapping] = exact.double()
    fields: dict[str, Any] = {"q_heads": Q_HEADS, "scale": DIM**-0.5, **SHAPE}
    name = str(dtype).removeprefix("torch.")
    op = operator(PagedAttentionRequest(dtype=name, cache_dtype="float8_e4m3fn", **fields))
    exact = operator(PagedAttentionRequest(dtype="float64", cache_dtype="float64", **fields))
    found = op.run(query, cache, op.plan(where)).double()
    plan = exact.plan(where)
    expected = exact.run(query.double(), plain, plan)

    off = {n: torch.maximum(plain[n].abs() / 16, torch.tensor(2.0**-10)) for n in plain}
    group = Q_HEADS // KV_HEADS
    wide = off["key"].view(-1, KV_HEADS, DIM)[where.slot_mapping].repeat_interleave(group, 1)
    delta = DIM**-0.5 * (query.double().abs()[:, None] * wide[None]).sum(-1).amax(1)  # of any key: [rows, heads]
    moved = torch.expm1(2 * delta)[..., None]
    magnitude = exact.run(query.double(), {"key": plain["key"], "value": plain["value"].abs() + off["value"]}, plan)
    spread = exact.run(query.double(), {"key": plain["key"], "value": off["value"]}, plan)
    bound = moved * magnitude + spread + 2.0**-7 * expected.abs() + 1e-5
    assert bool(((found - expected).abs() <= bound).all())
    assert float((found - expected).abs().max()) > 2.0**-9  # and it is FP8 that was read
