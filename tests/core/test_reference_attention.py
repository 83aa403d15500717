"""Paged attention of the reference backend, against a float64 formula and torch's own attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from reference_support import layout, operator

from deepinfer_core.api import PagedAttentionRequest, StepLayout, WriteKVRequest

BLOCK = 4
Q_HEADS, KV_HEADS, DIM = 6, 2, 16
SCALE = 1 / math.sqrt(DIM)


def paged(dtype: str = "float32", **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "cache_group": "full",
        "q_heads": Q_HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": DIM,
        "dtype": dtype,
        "cache_dtype": dtype,
        "scale": SCALE,
        "block_size": BLOCK,
    }
    return operator(PagedAttentionRequest(**(fields | changes)))


def write_kv(dtype: str = "float32") -> Any:
    return operator(
        WriteKVRequest(
            cache_group="full", kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype, cache_dtype=dtype, block_size=BLOCK
        )
    )


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Scene:
    """Requests with known keys and values, laid into a shuffled cache whose other rows hold NaN."""

    def __init__(
        self, queries: list[int], contexts: list[int], dtype: torch.dtype = torch.float32, block_size: int = BLOCK
    ) -> None:
        self.layout, blocks = layout(queries, contexts, block_size)
        self.queries, self.contexts = queries, contexts
        self.query = random(sum(queries), Q_HEADS, DIM, seed=1).to(dtype)
        self.keys = [random(c, KV_HEADS, DIM, seed=10 + i).to(dtype) for i, c in enumerate(contexts)]
        self.values = [random(c, KV_HEADS, DIM, seed=50 + i).to(dtype) for i, c in enumerate(contexts)]
        empty = torch.full((blocks, block_size, KV_HEADS, DIM), float("nan"), dtype=dtype)
        self.cache = {"key": empty.clone(), "value": empty.clone()}
        for row, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            for position in range(len(keys)):
                block = int(self.layout.block_table[row, position // block_size])
                self.cache["key"][block, position % block_size] = keys[position]
                self.cache["value"][block, position % block_size] = values[position]

    def attend(self, op: Any, sinks: torch.Tensor | None = None) -> torch.Tensor:
        result: torch.Tensor = op.run(self.query, self.cache, op.plan(self.layout), sinks)
        return result

    def formula(
        self, window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One row and one head at a time, in float64."""
        rows: list[torch.Tensor] = []
        for request, (length, context) in enumerate(zip(self.queries, self.contexts, strict=True)):
            for position in range(context - length, context):
                query = self.query[len(rows)].double()
                first = 0 if window is None else max(0, position - window + 1)
                heads = []
                for head in range(Q_HEADS):
                    group = head // (Q_HEADS // KV_HEADS)
                    keys = self.keys[request][first : position + 1, group].double()
                    values = self.values[request][first : position + 1, group].double()
                    scores = keys @ query[head] * SCALE
                    if softcap is not None:
                        scores = softcap * torch.tanh(scores / softcap)
                    weights = torch.exp(scores)
                    extra = 0.0 if sinks is None else math.exp(float(sinks[head]))
                    heads.append((weights / (weights.sum() + extra)) @ values)
                rows.append(torch.stack(heads))
        return torch.stack(rows)


MIXED = ([1, 3, 7, 1], [9, 3, 18, 1])


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("float64", 1e-13), ("bfloat16", 2e-2)])
def test_equals_the_formula_for_mixed_prefill_and_decode(dtype: str, tolerance: float) -> None:
    scene = Scene(*MIXED, dtype=getattr(torch, dtype))
    result = scene.attend(paged(dtype))
    assert result.dtype == scene.query.dtype
    torch.testing.assert_close(result.double(), scene.formula(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [1, 3, 8, 100])
def test_window_hides_what_lies_further_back(window: int) -> None:
    scene = Scene(*MIXED)
    result = scene.attend(paged(window=window))
    torch.testing.assert_close(result.double(), scene.formula(window=window), rtol=2e-6, atol=2e-6)


def test_window_never_reads_blocks_that_slid_out() -> None:
    scene = Scene([2], [14])
    expected = scene.attend(paged(window=3))
    # Rows 12 and 13 see positions 10 to 13: blocks 0 and 1 may be gone, their table entries 0.
    scene.layout.block_table[0, :2] = 0
    assert torch.equal(scene.attend(paged(window=3)), expected)


def test_softcap_bends_the_scores() -> None:
    scene = Scene(*MIXED)
    result = scene.attend(paged(softcap=0.7))
    torch.testing.assert_close(result.double(), scene.formula(softcap=0.7), rtol=2e-6, atol=2e-6)
    assert not torch.allclose(result.double(), scene.formula(), atol=1e-3)


def test_sinks_enlarge_only_the_denominator() -> None:
    scene = Scene(*MIXED)
    sinks = torch.linspace(-2, 2, Q_HEADS)
    result = scene.attend(paged(sinks=True), sinks)
    torch.testing.assert_close(result.double(), scene.formula(sinks=sinks), rtol=2e-6, atol=2e-6)


def test_window_softcap_and_sinks_together() -> None:
    scene = Scene(*MIXED)
    sinks = torch.linspace(2, -2, Q_HEADS)
    result = scene.attend(paged(window=5, softcap=2.0, sinks=True), sinks)
    torch.testing.assert_close(result.double(), scene.formula(window=5, softcap=2.0, sinks=sinks), rtol=2e-6, atol=2e-6)


def test_equals_torch_attention_on_a_whole_prompt() -> None:
    scene = Scene([11], [11])
    expected = torch.nn.functional.scaled_dot_product_attention(
        scene.query.transpose(0, 1),
        scene.keys[0].transpose(0, 1),
        scene.values[0].transpose(0, 1),
        is_causal=True,
        scale=SCALE,
        enable_gqa=True,
    ).transpose(0, 1)
    torch.testing.assert_close(scene.attend(paged()), expected, rtol=1e-5, atol=1e-5)


def test_large_scores_do_not_overflow() -> None:
    scene = Scene([3], [3])
    scene.query = scene.query * 1e4
    assert scene.attend(paged()).isfinite().all()


def test_query_may_be_a_slice_of_a_wider_tensor() -> None:
    scene = Scene(*MIXED)
    expected = scene.attend(paged())
    wide = torch.cat((scene.query, torch.zeros_like(scene.query)), dim=1)
    scene.query = wide[:, :Q_HEADS]
    assert not scene.query.is_contiguous()
    assert torch.equal(scene.attend(paged()), expected)


def test_no_rows() -> None:
    scene = Scene([], [])
    assert scene.attend(paged()).shape == (0, Q_HEADS, DIM)


def test_a_request_without_rows_in_this_step_is_skipped() -> None:
    scene = Scene([0, 2], [5, 6])
    torch.testing.assert_close(scene.attend(paged()).double(), scene.formula(), rtol=2e-6, atol=2e-6)


def written(rows: int, where: StepLayout, blocks: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    cache = {name: torch.full((blocks, BLOCK, KV_HEADS, DIM), 7.0) for name in ("key", "value")}
    key = random(rows, KV_HEADS, DIM, seed=3).float()
    value = random(rows, KV_HEADS, DIM, seed=4).float()
    write_kv().run(key, value, cache, where)
    return cache, key, value


def test_write_puts_each_row_where_the_mapping_says() -> None:
    where, blocks = layout([3, 6], [5, 6], BLOCK)
    cache, key, value = written(9, where, blocks)
    for row, slot in enumerate(where.slot_mapping.tolist()):
        assert torch.equal(cache["key"][slot // BLOCK, slot % BLOCK], key[row])
        assert torch.equal(cache["value"][slot // BLOCK, slot % BLOCK], value[row])


def test_write_touches_no_other_row() -> None:
    where, blocks = layout([3, 6], [5, 6], BLOCK)
    cache, _, _ = written(9, where, blocks)
    others = sorted(set(range(blocks * BLOCK)) - set(where.slot_mapping.tolist()))
    assert len(others) == blocks * BLOCK - 9
    for entry in cache.values():
        assert (entry.flatten(0, 1)[others] == 7.0).all()


def test_rewriting_a_row_replaces_it() -> None:
    where, blocks = layout([2], [2], BLOCK)
    cache, key, value = written(2, where, blocks)
    write_kv().run(value, key, cache, where)
    assert torch.equal(cache["key"].flatten(0, 1)[where.slot_mapping], value)


def test_write_converts_to_the_cache_dtype() -> None:
    where, blocks = layout([2], [2], BLOCK)
    cache = {name: torch.zeros(blocks, BLOCK, KV_HEADS, DIM, dtype=torch.bfloat16) for name in ("key", "value")}
    key = random(2, KV_HEADS, DIM, seed=3).float()
    write_kv().run(key, key, cache, where)
    assert torch.equal(cache["key"].flatten(0, 1)[where.slot_mapping], key.bfloat16())


def test_write_of_no_rows_changes_nothing() -> None:
    where, _ = layout([], [], BLOCK)
    cache, _, _ = written(0, where, 2)
    assert all((entry == 7.0).all() for entry in cache.values())
