"""The indexer's choice: score by score, ties, visibility, NaN."""

from __future__ import annotations

import pytest
import torch
from reference_support import layout, operator

from deepinfer_core.api import IndexTopKRequest

HEADS, DIM, RATE, BLOCK = 3, 4, 4, 8


def build(top_k: int) -> IndexTopKRequest:
    return IndexTopKRequest(
        cache_group="index",
        heads=HEADS,
        head_dim=DIM,
        top_k=top_k,
        rate=RATE,
        dtype="float32",
        cache_dtype="float32",
        scale=0.25,
        block_size=BLOCK,
    )


def brute_force(query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, visible: int, top_k: int) -> list[int]:
    scores = []
    for entry in range(visible):
        products = [max(float(query[h] @ keys[entry]), 0.0) * float(weights[h]) for h in range(HEADS)]
        scores.append(sum(products))
    order = sorted(range(visible), key=lambda e: (-scores[e], e))[:top_k]
    return sorted(order) + [-1] * (top_k - len(order))


@pytest.mark.parametrize("top_k", [1, 3, 5, 40])
def test_against_brute_force(top_k: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lens, contexts = [5, 1, 0, 3], [30, 9, 12, 3]
    step, blocks = layout(lens, contexts, BLOCK)
    cache = {"key": torch.randn(blocks, BLOCK // RATE, DIM, generator=generator)}
    rows = sum(lens)
    query = torch.randn(rows, HEADS, DIM, generator=generator)
    weights = torch.randn(rows, HEADS, generator=generator)
    op = operator(build(top_k))
    found = op.run(query, weights, cache, op.plan(step))
    owners = torch.repeat_interleave(torch.arange(4), torch.tensor(lens))
    for row in range(rows):
        keys = cache["key"][step.block_table[owners[row]].long()].flatten(0, 1)
        visible = (int(step.positions[row]) + 1) // RATE
        assert found[row].tolist() == brute_force(query[row], weights[row], keys, visible, top_k)


def one_query(keys: torch.Tensor, query: torch.Tensor, weights: torch.Tensor, top_k: int) -> list[int]:
    count = len(keys) * RATE
    step, blocks = layout([1], [count], BLOCK)
    cache = {"key": torch.zeros(blocks, BLOCK // RATE, DIM)}
    table = step.block_table[0].long()
    for entry, key in enumerate(keys):
        cache["key"][table[entry * RATE // BLOCK], entry % (BLOCK // RATE)] = key
    op = operator(build(top_k))
    chosen: list[int] = op.run(query[None], weights[None], cache, op.plan(step))[0].tolist()
    return chosen


def test_equal_scores_go_to_the_lowest_ids() -> None:
    assert one_query(torch.zeros(9, DIM), torch.ones(HEADS, DIM), torch.ones(HEADS), 4) == [0, 1, 2, 3]


def test_relu_comes_before_the_weights() -> None:
    """A negative product counts nothing even under a negative weight; a positive one then counts against."""
    keys = torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0]])
    query = torch.zeros(HEADS, DIM)
    query[0, 0] = 1.0
    assert one_query(keys, query, torch.tensor([-1.0, 0, 0]), 1) == [1]
    assert one_query(keys, query, torch.tensor([1.0, 0, 0]), 1) == [0]


def test_nan_scores_lose_to_numbers_but_not_to_what_is_invisible() -> None:
    keys = torch.ones(5, DIM)
    keys[1], keys[3] = float("nan"), float("nan")
    query, weights = torch.ones(HEADS, DIM), -torch.ones(HEADS)
    assert one_query(keys, query, weights, 3) == [0, 2, 4]
    assert one_query(keys, query, weights, 4) == [0, 1, 2, 4]


def test_infinite_scores_keep_their_order() -> None:
    keys = torch.ones(4, DIM)
    keys[2] = float("inf")
    assert one_query(keys, torch.ones(HEADS, DIM), torch.ones(HEADS), 1) == [2]
    assert one_query(keys, torch.ones(HEADS, DIM), -torch.ones(HEADS), 3) == [0, 1, 3]


@pytest.mark.parametrize("position", range(8))
def test_an_entry_is_visible_to_the_token_that_closes_it(position: int) -> None:
    step, blocks = layout([1], [position + 1], BLOCK)
    cache = {"key": torch.ones(blocks, BLOCK // RATE, DIM)}
    op = operator(build(2))
    found = op.run(torch.ones(1, HEADS, DIM), torch.ones(1, HEADS), cache, op.plan(step))
    count = (position + 1) // RATE
    assert found[0].tolist() == [*range(count), -1, -1][:2]


def test_no_rows() -> None:
    step, _ = layout([], [], BLOCK)
    op = operator(build(2))
    found = op.run(torch.zeros(0, HEADS, DIM), torch.zeros(0, HEADS), {"key": torch.zeros(1, 2, DIM)}, op.plan(step))
    assert found.shape == (0, 2)
