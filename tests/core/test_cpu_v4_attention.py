"""The host's sparse attention and choice of entries against the reference, over steps of every make-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest
import reference_support
import torch
from cpu_support import normal, operator
from reference_support import layout

from deepinfer_core.api import IndexTopKRequest, SparseAttentionRequest, StepLayout
from deepinfer_core.cpu import few_rows, index_topk, sparse_attention
from deepinfer_core.cpu.index_topk import best

EPSILON = 2.0**-24
HEADS, DIM, BLOCK, RATE = 3, 16, 16, 4

STEPS: dict[str, tuple[list[int], list[int]]] = {
    "one row": ([1], [70]),
    "first token": ([1], [1]),
    "full windows": ([1, 1, 1], [64, 64, 64]),
    "decode of different lengths": ([1, 1, 1, 1], [3, 70, 19, 5]),
    "drafts": ([3, 1, 5], [33, 9, 5]),
    "one prompt": ([40], [40]),
    "a chunk of a prompt": ([17], [50]),
    "decode beside prompts": ([1, 20, 2, 9], [47, 20, 6, 31]),
    "a request without rows": ([1, 0, 1], [20, 30, 40]),
    "no rows": ([], []),
}


def attention(window: int, chosen: int = -1, **changes: Any) -> SparseAttentionRequest:
    """Without entries for ``chosen`` -1; with all of them for 0."""
    entries: dict[str, Any] = {} if chosen < 0 else {"entry_group": "entries", "rate": RATE, "chosen": chosen}
    return SparseAttentionRequest(
        cache_group="window",
        heads=HEADS,
        head_dim=DIM,
        dtype="float32",
        cache_dtype="float32",
        scale=DIM**-0.5,
        block_size=BLOCK,
        window=window,
        **entries,
        **changes,
    )


def chooser(top_k: int) -> IndexTopKRequest:
    return IndexTopKRequest(
        cache_group="index", heads=HEADS, head_dim=DIM, top_k=top_k, rate=RATE, dtype="float32",
        cache_dtype="float32", scale=0.1, block_size=BLOCK,
    )  # fmt: skip


def poisoned(step: StepLayout, blocks: int, rows: int, rate: int, first: Sequence[int] | None = None) -> torch.Tensor:
    """``[blocks, rows, DIM]``: NaN wherever no token, or no complete entry, of a request lies; ``first``: nor before
    this position of each request."""
    cache = torch.full((blocks, rows, DIM), float("nan"))
    for request, context in enumerate(step.host_seq_lens.tolist()):
        for number in range((first[request] if first else 0) // rate, context // rate):
            block = int(step.block_table[request, number // rows])
            cache[block, number % rows] = normal(DIM, seed=1000 * request + number)
    return cache


def some_ids(step: StepLayout, top_k: int, seed: int) -> torch.Tensor:
    """Random visible entries for every row, ascending, -1 last."""
    generator = np.random.default_rng(seed)
    ids = torch.full((len(step.positions), top_k), -1, dtype=torch.int64)
    for row, position in enumerate(step.positions.tolist()):
        visible = (position + 1) // RATE
        found = np.sort(generator.permutation(visible)[:top_k])
        ids[row, : len(found)] = torch.from_numpy(found)
    return ids


def both(request: SparseAttentionRequest, lens: list[int], contexts: list[int], seed: int = 0) -> Any:
    """(found, wanted) of the host's operator and the reference's."""
    step, blocks = layout(lens, contexts, BLOCK, seed=seed)
    entry_step, entry_blocks = layout(lens, contexts, BLOCK, seed=seed + 1)
    lowest = [max(0, c - q - request.window + (1 if request.causal else 0))
              for q, c in zip(lens, contexts, strict=True)]  # fmt: skip
    cache = {"kv": poisoned(step, blocks, BLOCK, 1, lowest)}
    entries = {"kv": poisoned(entry_step, entry_blocks, BLOCK // RATE, RATE)} if request.rate else None
    chosen = some_ids(step, request.chosen, seed) if request.chosen else None
    query, sinks = normal(len(step.positions), HEADS, DIM, seed=seed + 2), normal(HEADS, seed=seed + 3)
    results = []
    for op in (operator(request), reference_support.operator(request)):
        plan = op.plan(step, entry_step if request.rate else None)
        results.append(op.run(query, cache, entries, plan, sinks, chosen))
    return results


def check(found: torch.Tensor, wanted: torch.Tensor, columns: int) -> None:
    """Sums of DIM products, and of as many as there are keys, of numbers around 1 that seldom pass 4."""
    assert found.shape == wanted.shape
    assert found.isfinite().all()
    assert torch.allclose(found, wanted, rtol=0, atol=16 * (DIM + columns) * EPSILON)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("chosen", [-1, 0, 1, 3, 40])
@pytest.mark.parametrize("window", [1, 8, 64])
def test_attention_equals_the_reference(step: str, chosen: int, window: int) -> None:
    found, wanted = both(attention(window, chosen), *STEPS[step])
    check(found, wanted, 64 + 20)


@pytest.mark.parametrize("step", [([4], [12]), ([5, 1, 8], [30, 1, 21]), ([12], [40])])
def test_a_block_of_drafts_sees_all_of_itself(step: tuple[list[int], list[int]]) -> None:
    found, wanted = both(attention(8, causal=False), *step)
    check(found, wanted, 30)


def test_too_much_to_gather_goes_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_attention, "MOST_GATHERED", DIM * 10)
    op, request = operator(attention(64, 0)), attention(64, 0)
    step, _ = layout([1, 2], [60, 5], BLOCK)
    assert op.plan(step, step).gather is None
    found, wanted = both(request, [1, 2], [60, 5])
    check(found, wanted, 84)


def test_a_sink_of_minus_infinity_takes_no_share() -> None:
    request = attention(8)
    step, blocks = layout([1, 1], [20, 3], BLOCK)
    cache, query = {"kv": poisoned(step, blocks, BLOCK, 1)}, normal(2, HEADS, DIM, seed=1)
    op = operator(request)
    found = op.run(query, cache, None, op.plan(step), torch.full((HEADS,), float("-inf")))
    rows = [cache["kv"][step.block_table[r].long()].flatten(0, 1)[max(0, c - 8) : c] for r, c in ((0, 20), (1, 3))]
    for row, keys in enumerate(rows):
        weights = torch.softmax(query[row].double() @ keys.double().T * DIM**-0.5, -1)
        check(found[row].double(), weights @ keys.double(), 8)


def test_a_broken_row_breaks_no_other() -> None:
    step, blocks = layout([1, 1, 1], [20, 7, 30], BLOCK)
    cache, query = {"kv": poisoned(step, blocks, BLOCK, 1)}, normal(3, HEADS, DIM, seed=1)
    op, sinks = operator(attention(8)), normal(HEADS, seed=2)
    clean = op.run(query, cache, None, op.plan(step), sinks)
    query[1] = float("nan")
    found = op.run(query, cache, None, op.plan(step), sinks)
    assert torch.equal(found[[0, 2]], clean[[0, 2]])
    assert found[1].isnan().all()


def test_writing_touches_its_slots_only() -> None:
    op = operator(attention(8))
    step, blocks = layout([2, 1], [18, 5], BLOCK)
    cache, kv = {"kv": torch.zeros(blocks, BLOCK, DIM)}, normal(3, DIM, seed=1)
    op.write(kv, cache, step)
    flat = cache["kv"].flatten(0, 1)
    assert torch.equal(flat[step.slot_mapping], kv)
    assert flat.count_nonzero() == kv.count_nonzero()


# ---- the choice


def choices(top_k: int, lens: list[int], contexts: list[int], seed: int = 0) -> Any:
    request = chooser(top_k)
    step, blocks = layout(lens, contexts, BLOCK, seed=seed)
    cache = {"key": poisoned(step, blocks, BLOCK // RATE, RATE)}
    rows = len(step.positions)
    # Whole numbers: sums are exact in any order, and equal scores do occur.
    cache["key"] = (cache["key"] * 2).round()
    query, weights = (normal(rows, HEADS, DIM, seed=5) * 2).round(), (normal(rows, HEADS, seed=6) * 2).round()
    return [op.run(query, weights, cache, op.plan(step)) for op in (operator(attrs.evolve(request, scale=0.5)),
            reference_support.operator(attrs.evolve(request, scale=0.5)))]  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("top_k", [1, 2, 5, 40])
def test_the_choice_is_the_references(step: str, top_k: int) -> None:
    found, wanted = choices(top_k, *STEPS[step])
    assert found.dtype == torch.int64
    assert torch.equal(found, wanted)


def test_a_choice_from_too_many_goes_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_topk, "MOST_GATHERED", 1)
    step, _ = layout([1], [70], BLOCK)
    assert operator(chooser(2)).plan(step).gather is None
    assert torch.equal(*choices(2, [1, 2], [70, 33]))


def test_a_nan_score_loses_but_is_taken_before_nothing() -> None:
    step, blocks = layout([1], [24], BLOCK)
    cache = {"key": torch.ones(blocks, BLOCK // RATE, DIM)}
    cache["key"][int(step.block_table[0, 0]), 0] = float("nan")
    op = operator(chooser(5))
    found = op.run(torch.ones(1, HEADS, DIM), torch.ones(1, HEADS), cache, op.plan(step))
    assert found.tolist() == [[1, 2, 3, 4, 5]]
    weights = -torch.ones(1, HEADS) * float("inf")
    assert op.run(torch.ones(1, HEADS, DIM), weights, cache, op.plan(step)).tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("seed", range(20))
def test_best_is_a_stable_sort(seed: int) -> None:
    generator = np.random.default_rng(seed)
    scores = generator.integers(-2, 3, (4, 9)).astype(np.float32)
    visible = generator.integers(1, 10, 4)
    for row, count in enumerate(visible):
        scores[row, count:] = -np.inf
    for row, ids in enumerate(best(scores, visible, 4)):
        ranked = sorted(range(int(visible[row])), key=lambda i: (-scores[row, i], i))[:4]
        assert ids.tolist() == sorted(ranked) + [-1] * (4 - len(ranked))


# ---- dividing a step


def test_a_step_is_divided_by_rows_of_requests() -> None:
    step, _ = layout([1, few_rows.FEW_ROWS, few_rows.FEW_ROWS + 1], [5, 20, 30], BLOCK)
    few, many = few_rows.split(step)
    assert few is not None
    assert many is not None
    assert few.rows is not None
    assert few.rows.tolist() == list(range(9))
    assert few.owners.tolist() == [0, *[1] * 8]
    assert many.rows.tolist() == list(range(9, 18))
    assert many.layout.positions.tolist() == list(range(21, 30))
    assert many.layout.cu_seqlens.tolist() == [0, 9]
    assert many.layout.max_seq_len == 30
    assert many.layout.block_table.tolist() == [step.block_table[2].tolist()]
