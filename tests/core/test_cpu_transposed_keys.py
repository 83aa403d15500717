"""The host's paged attention over transposed keys, against a float64 formula. Other requests' cache rows hold NaN."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from cpu_support import normal, operator
from reference_support import layout
from test_cpu_attention import TOLERANCE, request
from test_reference_attention import BLOCK, DIM, KV_HEADS, Q_HEADS, Scene

from deepinfer_core.api import BuildContext, CacheEntry, CacheGroupSpec, KVLayoutRequest, WriteKVRequest
from deepinfer_core.cpu import attention_plan
from deepinfer_core.cpu.kv_layout import LINE, TransposedKeysLayout
from deepinfer_core.cpu.transposed_plan import Bucket, KnownLists, make_buckets

Caches = dict[str, torch.Tensor]


def paged(**changes: Any) -> Any:
    return operator(request(**changes), "paged_transposed")


def transposed(cache: Caches) -> Caches:
    """A cache of layout ``paged``, laid out anew."""
    return {
        "key": cache["key"].permute(0, 2, 3, 1).contiguous(),
        "value": cache["value"].permute(0, 2, 1, 3).contiguous(),
    }


class Transposed(Scene):
    """A scene whose cache is laid out anew."""

    def attend(self, op: Any, sinks: torch.Tensor | None = None) -> torch.Tensor:
        result: torch.Tensor = op.run(self.query, transposed(self.cache), op.plan(self.layout), sinks)
        return result


def test_any_step_equals_the_formula() -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    source = random.Random(seed)
    for _ in range(10):
        contexts = [source.randrange(1, 90) for _ in range(source.randrange(1, 9))]
        queries = [source.randrange(0, min(context, 14) + 1) for context in contexts]
        window = source.choice([None, source.randrange(1, 100)])
        scene = Transposed(queries, contexts)
        if sum(queries) == 0:
            continue
        found = scene.attend(paged(window=window))
        torch.testing.assert_close(found.double(), scene.formula(window=window), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(1, 1, 8), (4, 4, 16), (8, 1, 20), (9, 3, 64)])
@pytest.mark.parametrize("block", [4, 32, 64])
def test_both_layouts_give_the_same(q_heads: int, kv_heads: int, dim: int, block: int) -> None:
    where, blocks = layout([1, 3, 12, 1], [70, 9, 14, 64], block)
    cache = {name: normal(blocks, block, kv_heads, dim, seed=i) for i, name in enumerate(("key", "value"))}
    query = normal(17, q_heads, dim, seed=5)
    shape = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": dim, "block_size": block}
    ours, theirs = paged(**shape), operator(request(**shape), "paged_in_place")
    found = ours.run(query, transposed(cache), ours.plan(where))
    torch.testing.assert_close(found, theirs.run(query, cache, theirs.plan(where)), rtol=4e-6, atol=4e-6)


def test_without_causality_a_row_sees_all_of_its_request() -> None:
    where, blocks = layout([3, 1], [9, 21], BLOCK)
    cache = {name: normal(blocks, BLOCK, KV_HEADS, DIM, seed=i) for i, name in enumerate(("key", "value"))}
    query = normal(4, Q_HEADS, DIM, seed=5)
    ours, theirs = paged(causal=False), operator(request(causal=False), "paged_in_place")
    found = ours.run(query, transposed(cache), ours.plan(where))
    torch.testing.assert_close(found, theirs.run(query, cache, theirs.plan(where)), rtol=4e-6, atol=4e-6)


# ---- the plan


def planned(contexts: list[int], block: int = BLOCK) -> tuple[Bucket, ...]:
    where, _ = layout([1] * len(contexts), contexts, block)
    few = attention_plan.few_rows(where)
    asked = request(block_size=block)
    return make_buckets(asked, where, where.block_table.numpy(), few, KnownLists(asked))


def test_rows_of_similar_length_share_one_bucket_in_their_own_order() -> None:
    (bucket,) = planned([100, 90, 101, 95])
    assert bucket.rows is None
    assert bucket.scaled.shape == (4, Q_HEADS, 26, DIM)


def test_rows_of_different_lengths_are_not_padded_to_the_longest() -> None:
    contexts = list(range(10, 2000, 60))
    buckets = planned(contexts)
    rows = [row for bucket in buckets for row in ([] if bucket.rows is None else bucket.rows.tolist())]
    assert sorted(rows) == list(range(len(contexts)))
    held = sum(len(bucket.values) for bucket in buckets)
    assert held < Q_HEADS * (sum(contexts) * 1.25 + 3 * BLOCK * len(contexts))


def test_whole_blocks_hide_nothing() -> None:
    assert planned([8, 8])[0].hidden is None
    assert planned([8, 7])[0].hidden is not None


def test_steps_that_read_the_same_blocks_share_their_lists() -> None:
    asked = request(block_size=BLOCK)
    known = KnownLists(asked)

    def step(contexts: list[int], seed: int = 0) -> Bucket:
        where, _ = layout([1] * len(contexts), contexts, BLOCK, seed=seed)
        (bucket,) = make_buckets(asked, where, where.block_table.numpy(), attention_plan.few_rows(where), known)
        return bucket

    first, second = step([BLOCK + 1, 2 * BLOCK - 1]), step([BLOCK + 2, 2 * BLOCK])
    assert second.keys is first.keys
    assert not torch.equal(second.values, first.values)
    assert step([BLOCK + 2, 2 * BLOCK], seed=5).keys is not first.keys
    assert step([BLOCK + 2, 2 * BLOCK]).keys is not first.keys  # only the last step's are kept


def test_one_operator_over_many_steps_equals_a_new_one_for_each() -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    source = random.Random(seed)
    op, contexts = paged(block_size=4), [source.randrange(1, 30) for _ in range(5)]
    for number in range(24):
        where, blocks = layout([1] * len(contexts), contexts, 4)
        cache = {name: normal(blocks, 4, KV_HEADS, DIM, seed=i) for i, name in enumerate(("key", "value"))}
        query = normal(len(contexts), Q_HEADS, DIM, seed=100 + number)
        alone = paged(block_size=4)
        caches = [transposed(cache), transposed(cache)]
        found = [each.run(query, kept, each.plan(where)) for each, kept in zip((op, alone), caches, strict=True)]
        assert torch.equal(*found)
        contexts = [context + 1 for context in contexts]
        if source.random() < 0.3:
            contexts[source.randrange(len(contexts))] = source.randrange(1, 30)


# ---- writing


@pytest.mark.parametrize("step", [([3, 6], [5, 6]), ([1], [1]), ([], [])])
def test_write_puts_each_row_where_the_mapping_says_and_nothing_else(step: tuple[list[int], list[int]]) -> None:
    where, blocks = layout(*step, BLOCK)
    rows = len(where.slot_mapping)
    key, value = normal(rows, KV_HEADS, DIM, seed=1), normal(rows, KV_HEADS + 1, DIM, seed=2)[:, 1:]
    plain = {name: torch.full((blocks, BLOCK, KV_HEADS, DIM), 7.0) for name in ("key", "value")}
    caches = [transposed(plain), transposed(plain)]
    for row, slot in enumerate(where.slot_mapping.tolist()):
        plain["key"][slot // BLOCK, slot % BLOCK] = key[row]
        plain["value"][slot // BLOCK, slot % BLOCK] = value[row]
    op = operator(
        WriteKVRequest(
            cache_group="full",
            kv_heads=KV_HEADS,
            head_dim=DIM,
            dtype="float32",
            cache_dtype="float32",
            block_size=BLOCK,
        ),
        "write_kv_transposed",
    )
    for cache in caches:  # two layers of a step
        op.run(key, value, cache, where)
        assert all(torch.equal(cache[name], entry) for name, entry in transposed(plain).items())
    # Another step of the same shape goes to its own places.
    other, _ = layout(*step, BLOCK, seed=9)
    again = transposed({name: torch.zeros(blocks, BLOCK, KV_HEADS, DIM) for name in ("key", "value")})
    op.run(key, value, again, other)
    for row, slot in enumerate(other.slot_mapping.tolist()):
        assert torch.equal(again["key"][slot // BLOCK, :, :, slot % BLOCK], key[row])
        assert torch.equal(again["value"][slot // BLOCK, :, slot % BLOCK], value[row])


# ---- the layout


def group(**changes: Any) -> CacheGroupSpec:
    entries = tuple(CacheEntry(name, (KV_HEADS, DIM), "float32") for name in ("key", "value"))
    fields: dict[str, Any] = {"name": "full", "layers": 2, "entries": entries}
    return CacheGroupSpec(**(fields | changes))


def test_memory_is_zero_and_begins_at_a_cache_line() -> None:
    asked = KVLayoutRequest(group=group(), block_size=64)
    context: BuildContext = None  # type: ignore[assignment]  # the layout asks nothing of it
    made = TransposedKeysLayout(asked, context)
    caches = made.allocate(5)
    assert len(caches) == 2
    assert {name: tuple(t.shape) for name, t in caches[0].items()} == {
        "key": (5, KV_HEADS, DIM, 64),
        "value": (5, KV_HEADS, 64, DIM),
    }
    tensors = [tensor for cache in caches for tensor in cache.values()]
    assert all(tensor.data_ptr() % LINE == 0 and not tensor.any() for tensor in tensors)
    assert sum(tensor.numel() * tensor.itemsize for tensor in tensors) == 5 * made.block_bytes()
