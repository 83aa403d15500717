"""Attention over a window, entries and a sink: against the formula, row by row in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_support import layout, operator

from deepinfer_core.api import SparseAttentionRequest

HEADS, DIM, RATE, BLOCK, WINDOW, SCALE = 3, 6, 4, 8, 5, 0.4
LENS, CONTEXTS = [4, 1, 0, 7], [19, 11, 6, 7]


def request(**changes: Any) -> SparseAttentionRequest:
    fields: dict[str, Any] = {
        "cache_group": "window",
        "entry_group": "entries",
        "heads": HEADS,
        "head_dim": DIM,
        "dtype": "float32",
        "cache_dtype": "float32",
        "scale": SCALE,
        "block_size": BLOCK,
        "window": WINDOW,
        "rate": RATE,
    }
    return SparseAttentionRequest(**(fields | changes))


class Case:
    """Four requests over shuffled blocks, different ones in the two groups; the null block is NaN."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        self.step, blocks = layout(LENS, CONTEXTS, BLOCK, seed=1)
        self.entry_step, _ = layout(LENS, CONTEXTS, BLOCK, seed=2)
        self.cache = {"kv": torch.randn(blocks, BLOCK, DIM, generator=generator)}
        self.entries = {"kv": torch.randn(blocks, BLOCK // RATE, DIM, generator=generator)}
        self.cache["kv"][0] = self.entries["kv"][0] = float("nan")
        self.query = torch.randn(sum(LENS), HEADS, DIM, generator=generator)
        self.sinks = torch.randn(HEADS, generator=generator)
        self.owners = torch.repeat_interleave(torch.arange(4), torch.tensor(LENS)).tolist()

    def rows(self, request: int) -> torch.Tensor:
        return self.cache["kv"][self.step.block_table[request].long()].flatten(0, 1)

    def entry_rows(self, request: int) -> torch.Tensor:
        return self.entries["kv"][self.entry_step.block_table[request].long()].flatten(0, 1)

    def wanted(self, row: int, keys: torch.Tensor) -> torch.Tensor:
        out = []
        for head in range(HEADS):
            scores = keys.double() @ self.query[row, head].double() * SCALE
            weights = scores.exp() / (scores.exp().sum() + self.sinks[head].double().exp())
            out.append(weights @ keys.double())
        return torch.stack(out).float()


def test_window_only() -> None:
    case = Case()
    op = operator(request(entry_group="", rate=0))
    found = op.run(case.query, case.cache, None, op.plan(case.step), case.sinks)
    for row, owner in enumerate(case.owners):
        position = int(case.step.positions[row])
        keys = case.rows(owner)[max(0, position - WINDOW + 1) : position + 1]
        assert torch.allclose(found[row], case.wanted(row, keys), atol=1e-5)


def test_every_visible_entry_counts_beside_the_window() -> None:
    """Raw rows and entries that cover the same tokens both count."""
    case = Case()
    op = operator(request())
    plan = op.plan(case.step, case.entry_step)
    found = op.run(case.query, case.cache, case.entries, plan, case.sinks)
    for row, owner in enumerate(case.owners):
        position = int(case.step.positions[row])
        window = case.rows(owner)[max(0, position - WINDOW + 1) : position + 1]
        keys = torch.cat((window, case.entry_rows(owner)[: (position + 1) // RATE]))
        assert torch.allclose(found[row], case.wanted(row, keys), atol=1e-5)


def test_only_chosen_entries_count() -> None:
    case = Case()
    op = operator(request(chosen=2))
    chosen = torch.full((sum(LENS), 2), -1)
    for row in range(sum(LENS)):
        visible = (int(case.step.positions[row]) + 1) // RATE
        picks = [visible - 1, visible - 3][: min(visible, 2)]
        picks = sorted(p for p in picks if p >= 0)
        chosen[row, : len(picks)] = torch.tensor(picks, dtype=torch.int64)
    found = op.run(case.query, case.cache, case.entries, op.plan(case.step, case.entry_step), case.sinks, chosen)
    for row, owner in enumerate(case.owners):
        position = int(case.step.positions[row])
        window = case.rows(owner)[max(0, position - WINDOW + 1) : position + 1]
        keys = torch.cat((window, case.entry_rows(owner)[chosen[row][chosen[row] >= 0]]))
        assert torch.allclose(found[row], case.wanted(row, keys), atol=1e-5)


def test_a_block_of_drafts_sees_itself_and_the_window_before_it() -> None:
    case = Case()
    op = operator(request(entry_group="", rate=0, causal=False))
    found = op.run(case.query, case.cache, None, op.plan(case.step), case.sinks)
    for row, owner in enumerate(case.owners):
        first = CONTEXTS[owner] - LENS[owner]
        keys = case.rows(owner)[max(0, first - WINDOW) : CONTEXTS[owner]]
        assert torch.allclose(found[row], case.wanted(row, keys), atol=1e-5)


def test_rows_before_the_window_are_not_read() -> None:
    case = Case()
    op = operator(request(entry_group="", rate=0))
    step, blocks = layout([2], [19], BLOCK)
    cache = {"kv": torch.ones(blocks, BLOCK, DIM)}
    cache["kv"][int(step.block_table[0, 0])] = float("nan")
    found = op.run(case.query[:2], cache, None, op.plan(step), case.sinks)
    assert found.isfinite().all()


def test_a_large_sink_takes_all_the_weight_and_a_small_one_none() -> None:
    case = Case()
    op = operator(request(entry_group="", rate=0))
    plan = op.plan(case.step)
    everything = op.run(case.query, case.cache, None, plan, torch.full((HEADS,), 80.0))
    assert everything.abs().max() < 1e-20
    nothing = op.run(case.query, case.cache, None, plan, torch.full((HEADS,), float("-inf")))
    first = CONTEXTS[3] - LENS[3]
    assert first == 0
    assert torch.allclose(nothing[5], case.rows(3)[0].expand(HEADS, DIM), atol=1e-6)


def test_write_puts_rows_where_the_step_says_and_nowhere_else() -> None:
    case = Case()
    op = operator(request())
    cache = {"kv": torch.zeros_like(case.cache["kv"])}
    kv = torch.randn(sum(LENS), DIM)
    op.write(kv, cache, case.step)
    flat = cache["kv"].flatten(0, 1)
    assert torch.equal(flat[case.step.slot_mapping], kv)
    flat[case.step.slot_mapping] = 0
    assert not flat.any()


@pytest.mark.parametrize("chosen", [0, 2])
def test_no_rows(chosen: int) -> None:
    step, _ = layout([], [], BLOCK)
    op = operator(request(chosen=chosen))
    cache, entries = {"kv": torch.zeros(1, BLOCK, DIM)}, {"kv": torch.zeros(1, BLOCK // RATE, DIM)}
    op.write(torch.zeros(0, DIM), cache, step)
    picks = torch.zeros(0, chosen, dtype=torch.int64) if chosen else None
    empty = torch.zeros(0, HEADS, DIM)
    assert op.run(empty, cache, entries, op.plan(step, step), torch.zeros(HEADS), picks).shape == (0, HEADS, DIM)


def test_it_names_every_group_it_touches() -> None:
    assert request().cache_groups == ("window", "entries")
    assert request(entry_group="").cache_groups == ("window",)
