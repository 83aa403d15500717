"""The host's paged attention against a float64 formula. The cache rows of other requests hold NaN throughout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpu_support import normal, operator
from reference_support import layout
from test_reference_attention import BLOCK, DIM, KV_HEADS, Q_HEADS, SCALE, Scene

from deepinfer_core.api import PagedAttentionRequest, WriteKVRequest
from deepinfer_core.cpu.attention_plan import FEW_ROWS, AttentionPlan, make_plan

TOLERANCE = 2e-6  # of values near 1, averaged under weights that sum to 1, in float32


def request(**changes: Any) -> PagedAttentionRequest:
    fields: dict[str, Any] = {
        "cache_group": "full",
        "q_heads": Q_HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": DIM,
        "dtype": "float32",
        "cache_dtype": "float32",
        "scale": SCALE,
        "block_size": BLOCK,
    }
    return PagedAttentionRequest(**(fields | changes))


def paged(**changes: Any) -> Any:
    return operator(request(**changes), "paged_in_place")


@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(1, 1, 8), (4, 4, 16), (8, 1, 20), (9, 3, 64)])
def test_head_counts_and_sizes(q_heads: int, kv_heads: int, dim: int) -> None:
    where, blocks = layout([1, 12], [10, 14], BLOCK)
    cache = {name: normal(blocks, BLOCK, kv_heads, dim, seed=i) for i, name in enumerate(("key", "value"))}
    query = normal(13, q_heads, dim, seed=5)
    op = paged(q_heads=q_heads, kv_heads=kv_heads, head_dim=dim)
    found = op.run(query, cache, op.plan(where))
    slots = where.block_table.long()[:, torch.arange(14) // BLOCK] * BLOCK + torch.arange(14) % BLOCK
    for row in range(13):
        owner, seen = (0, 10) if row == 0 else (1, row + 2)
        keys, values = (cache[n].flatten(0, 1)[slots[owner, :seen]].double() for n in ("key", "value"))
        group = torch.arange(q_heads) // (q_heads // kv_heads)
        scores = torch.einsum("hd,shd->hs", query[row].double(), keys[:, group]) * SCALE
        expected = torch.einsum("hs,shd->hd", scores.softmax(-1), values[:, group])
        torch.testing.assert_close(found[row].double(), expected, rtol=4e-6, atol=4e-6)


def test_rows_of_one_request_equal_single_rows() -> None:
    scene = Scene([4], [44])
    together = scene.attend(paged())
    op = paged()
    for row in range(4):
        single, _ = layout([1], [41 + row], BLOCK)
        single.block_table = scene.layout.block_table
        assert torch.equal(op.run(scene.query[row : row + 1], scene.cache, op.plan(single)), together[row : row + 1])


# ---- the plan


def planned(queries: list[int], contexts: list[int], **changes: Any) -> AttentionPlan:
    return make_plan(request(**changes), layout(queries, contexts, BLOCK)[0])


def test_rows_of_similar_length_share_one_bucket_in_their_own_order() -> None:
    gather = planned([1] * 4, [100, 90, 101, 95]).gather
    assert gather is not None
    assert gather.rows is None
    assert [b.width for b in gather.buckets] == [101]


def test_rows_of_different_lengths_are_not_padded_to_the_longest() -> None:
    contexts = list(range(10, 2000, 60))
    gather = planned([1] * len(contexts), contexts).gather
    assert gather is not None
    assert gather.rows is not None
    assert sorted(gather.rows.tolist()) == list(range(len(contexts)))
    held = len(gather.columns)
    assert held < Q_HEADS * (sum(contexts) * 1.25 + 32 * len(contexts))
    assert held == sum(b.end - b.start for b in gather.buckets)


def test_few_rows_are_gathered_and_many_are_not() -> None:
    plan = planned([1, FEW_ROWS, FEW_ROWS + 1], [5, 20, 20])
    assert plan.gather is not None
    assert plan.gather.rows is not None
    assert plan.gather.rows.tolist() == list(range(1 + FEW_ROWS))
    assert [(p.start, p.end) for c in plan.chunks for p in c.parts] == [(1 + FEW_ROWS, 2 + 2 * FEW_ROWS)]


def test_a_whole_prompt_needs_no_mask() -> None:
    (chunk,) = planned([20], [20]).chunks
    assert [part.mask for part in chunk.parts] == [None]


def test_a_chunk_reads_only_the_blocks_in_its_window() -> None:
    (chunk,) = planned([10], [50], window=6).chunks
    assert len(chunk.blocks) == 50 // BLOCK + 1 - 35 // BLOCK


# ---- writing


def write_kv() -> Any:
    return operator(
        WriteKVRequest(
            cache_group="full",
            kv_heads=KV_HEADS,
            head_dim=DIM,
            dtype="float32",
            cache_dtype="float32",
            block_size=BLOCK,
        ),
        "write_kv",
    )


@pytest.mark.parametrize("step", [([3, 6], [5, 6]), ([1], [1]), ([], [])])
def test_write_puts_each_row_where_the_mapping_says_and_nothing_else(step: tuple[list[int], list[int]]) -> None:
    where, blocks = layout(*step, BLOCK)
    rows = len(where.slot_mapping)
    key, value = normal(rows, KV_HEADS, DIM, seed=1), normal(rows, KV_HEADS + 1, DIM, seed=2)[:, 1:]
    cache = {name: torch.full((blocks, BLOCK, KV_HEADS, DIM), 7.0) for name in ("key", "value")}
    expected = {name: entry.clone() for name, entry in cache.items()}
    for row, slot in enumerate(where.slot_mapping.tolist()):
        expected["key"][slot // BLOCK, slot % BLOCK] = key[row]
        expected["value"][slot // BLOCK, slot % BLOCK] = value[row]
    write_kv().run(key, value, cache, where)
    assert all(torch.equal(cache[name], expected[name]) for name in cache)


def test_rewriting_a_row_replaces_it() -> None:
    where, blocks = layout([2], [2], BLOCK)
    cache = {name: torch.zeros(blocks, BLOCK, KV_HEADS, DIM) for name in ("key", "value")}
    first, second = normal(2, KV_HEADS, DIM, seed=1), normal(2, KV_HEADS, DIM, seed=2)
    write_kv().run(first, first, cache, where)
    write_kv().run(second, first, cache, where)
    assert torch.equal(cache["key"].flatten(0, 1)[where.slot_mapping], second)
