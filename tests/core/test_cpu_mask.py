"""The host's mask stage against the reference, which looks at every bit: the same bits, in place."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import reference_support
import torch
from cpu_support import normal, stage
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_support import batch

from deepinfer_core.api import SamplingBatch

ODD = [float("nan"), float("inf"), float("-inf"), -0.0, 3.4e38, -3.4e38, 1e-45]
WIDTHS = [1, 7, 8, 9, 31, 32, 33, 63, 64, 70, 257, 1000]


def bits(logits: torch.Tensor) -> list[list[int]]:
    found: list[list[int]] = logits.view(torch.int32).tolist()
    return found


def check(logits: torch.Tensor, step: SamplingBatch) -> None:
    """Equal in every bit, NaN's included, to the reference; written where the logits lie."""
    width = logits.shape[1]
    expected = reference_support.stage("mask", width).run(logits.clone(), step)
    mine = logits.clone()
    found = stage("mask", width).run(mine, step)
    assert found.data_ptr() == mine.data_ptr()
    assert bits(found) == bits(expected)


def with_odd_values(rows: int, width: int, seed: int) -> torch.Tensor:
    """Normal, with every kind of value that has a meaning of its own strewn in, NaNs of several payloads too."""
    generator = torch.Generator().manual_seed(seed)
    logits = normal(rows, width, seed=seed)
    strewn = torch.rand(rows, width, generator=generator) < 0.3
    kinds = torch.tensor(ODD)[torch.randint(0, len(ODD), (rows, width), generator=generator)]
    logits = torch.where(strewn, kinds, logits)
    payloads = torch.rand(rows, width, generator=generator) < 0.05
    return logits.view(torch.int32).masked_fill(payloads, -0x3FFFFF + seed).view(torch.float32)


def random_words(rows: int, width: int, seed: int, share: float) -> torch.Tensor:
    """``[rows, ceil(width / 32)]`` int32; bits past the width are anything."""
    open_bits = torch.rand(rows, -(-width // 32), 32, generator=torch.Generator().manual_seed(seed)) < share
    return (open_bits.to(torch.int64) << torch.arange(32)).sum(dim=2).to(torch.int32)


@settings(max_examples=150)
@given(
    width=st.sampled_from(WIDTHS),
    rows=st.integers(0, 5),
    seed=st.integers(0, 10**6),
    share=st.sampled_from([0.0, 0.02, 0.5, 0.97]),
    padding=st.integers(0, 40),
    data=st.data(),
)
def test_masks_of_any_width(width: int, rows: int, seed: int, share: float, padding: int, data: st.DataObject) -> None:
    kinds = data.draw(
        st.lists(st.sampled_from(["grammar", "allowed", "both", "neither"]), min_size=rows, max_size=rows)
    )
    step = batch([{} for _ in range(rows)], width, token_limit=max(0, width - padding))
    grammar, allowed = (random_words(rows, width, seed + offset, share) for offset in (1, 2))
    for row, kind in enumerate(kinds):
        if kind not in ("grammar", "both"):
            grammar[row] = -1
        if kind not in ("allowed", "both"):
            allowed[row] = -1
    slots = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    step = attrs.evolve(
        step,
        slots=slots,
        grammar=grammar if {"grammar", "both"} & set(kinds) else None,
        state=attrs.evolve(step.state, allowed=allowed if {"allowed", "both"} & set(kinds) else None),
    )
    check(with_odd_values(rows, width, seed), step)


small = st.integers(0, 3)
row_strategy = st.fixed_dictionaries(
    {
        "prompt": st.lists(small, min_size=1, max_size=4),
        "output": st.lists(small, max_size=4),
        "min_end": st.integers(0, 8),
        "stop_ids": st.lists(st.integers(-1, 80), max_size=3),
    },
    optional={
        "bad_words": st.lists(st.lists(small, min_size=1, max_size=4), max_size=3),
        "allowed": st.lists(st.integers(0, 69), max_size=20, unique=True),
        "grammar": st.lists(st.integers(0, 69), max_size=20, unique=True),
    },
)


@settings(max_examples=120)
@given(rows=st.lists(row_strategy, min_size=1, max_size=5), limit=st.integers(0, 70), seed=st.integers(0, 10**6))
def test_all_rules_together(rows: list[dict[str, Any]], limit: int, seed: int) -> None:
    check(with_odd_values(len(rows), 70, seed), batch(rows, 70, token_limit=limit))


def test_rows_of_one_slot_have_masks_of_their_own() -> None:
    """Draft rows share a slot and what it allows; each has its own grammar mask and history."""
    row = {"prompt": [1], "output": [5, 6, 5], "bad_words": [[5, 7]], "min_end": 3, "stop_ids": [20], "allowed": [5, 7]}
    step = batch(
        [row],
        70,
        slots=torch.zeros(4, dtype=torch.int64),
        positions=torch.tensor([1, 2, 3, 4]),
        max_position=4,
        grammar=random_words(4, 70, 3, 0.5),
    )
    check(with_odd_values(4, 70, 1), step)


def test_a_view_of_wider_logits_is_written_where_it_lies() -> None:
    wide = normal(3, 100, seed=1)
    step = batch([{"grammar": [1, 69]}, {}, {"grammar": []}], 70)
    before = wide.clone()
    found = stage("mask", 70).run(wide[:, :70], step)
    assert torch.equal(wide[:, 70:], before[:, 70:])
    assert torch.equal(found, reference_support.stage("mask", 70).run(before[:, :70], step))
    assert torch.equal(wide[:, :70], found)


@pytest.mark.parametrize("width", [1, 70])
def test_no_row_and_nothing_to_mask(width: int) -> None:
    check(normal(0, width, seed=1), batch([], width))
    check(with_odd_values(3, width, 1), batch([{}, {}, {}], width))
