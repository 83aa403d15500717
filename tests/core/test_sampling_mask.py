"""The mask stage of the reference backend, each rule alone and together, against plain Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_support import batch, kept, stage

V = 70


def allowed_ids(row: dict[str, Any], limit: int = V) -> list[int]:
    """The rules, one token at a time."""
    past = [*row.get("prompt", []), *row.get("output", [])]
    position = row.get("position", len(past))
    past = past[:position]
    result = []
    for token in range(V):
        if token >= limit:
            continue
        if token not in row.get("grammar", range(V)) or token not in row.get("allowed", range(V)):
            continue
        if token in row.get("stop_ids", []) and position < row.get("min_end", 0):
            continue
        extended = [*past, token]
        if any(extended[-len(word) :] == list(word) for word in row.get("bad_words", []) if word):
            continue
        result.append(token)
    return result


def survivors(rows: list[dict[str, Any]], **changes: Any) -> list[list[int]]:
    return kept(stage("mask", V).run(torch.zeros(len(rows), V), batch(rows, V, **changes)))


def test_nothing_to_mask_leaves_the_logits() -> None:
    logits = torch.randn(2, V, generator=torch.Generator().manual_seed(0))
    assert torch.equal(stage("mask", V).run(logits.clone(), batch([{}, {}], V)), logits)


def test_padding_ids_are_masked_in_every_row() -> None:
    assert survivors([{}, {}], token_limit=66) == [list(range(66))] * 2


def test_grammar_mask_reads_all_32_bits() -> None:
    ids = [0, 1, 30, 31, 32, 63, 64, 69]
    assert survivors([{"grammar": ids}, {}]) == [ids, list(range(V))]


def test_allowed_ids_restrict_their_row_only() -> None:
    assert survivors([{"allowed": [3, 31]}, {}]) == [[3, 31], list(range(V))]


@pytest.mark.parametrize(("position", "masked"), [(4, True), (5, True), (6, False)])
def test_stop_ids_are_masked_below_min_end(position: int, masked: bool) -> None:
    row = {"prompt": [1, 2, 3, 4], "output": [5, 6, 7], "min_end": 6, "stop_ids": [9, 11], "position": position}
    (ids,) = survivors([row])
    assert ids == [token for token in range(V) if not (masked and token in (9, 11))]


def test_rows_without_stop_ids_keep_theirs() -> None:
    assert survivors([{"min_end": 9, "stop_ids": [1]}, {"min_end": 9}])[1] == list(range(V))


def test_single_token_bad_words_are_always_masked() -> None:
    (ids,) = survivors([{"bad_words": [[7], [8]]}])
    assert ids == [token for token in range(V) if token not in (7, 8)]


def test_a_bad_word_is_masked_after_its_beginning() -> None:
    row = {"prompt": [1], "output": [5, 6], "bad_words": [[5, 6, 7]]}
    assert survivors([row]) == [[token for token in range(V) if token != 7]]


def test_a_bad_word_is_not_masked_after_another_token() -> None:
    row = {"prompt": [1], "output": [5, 6, 2], "bad_words": [[5, 6, 7]]}
    assert survivors([row]) == [list(range(V))]


def test_a_bad_word_may_begin_in_the_prompt() -> None:
    row = {"prompt": [5], "output": [6], "bad_words": [[5, 6, 7]]}
    assert 7 not in survivors([row])[0]


def test_a_bad_word_longer_than_the_history_is_not_masked() -> None:
    row = {"prompt": [6], "bad_words": [[5, 6, 7], [6, 6, 8], [6, 9]]}
    assert survivors([row]) == [[token for token in range(V) if token != 9]]


def test_bad_words_of_one_row_do_not_reach_another() -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": [5], "bad_words": [[5, 7], [8]]},
        {"prompt": [5], "bad_words": [[9]]},
        {"prompt": [5]},
    ]
    assert survivors(rows) == [[t for t in range(V) if t not in gone] for gone in ((7, 8), (9,), ())]


def test_rows_of_one_slot_are_masked_at_their_own_positions() -> None:
    """Draft rows: row j sees the history up to its own position."""
    rows = [{"prompt": [1], "output": [5, 6, 5], "bad_words": [[5, 7], [6, 8]], "min_end": 3, "stop_ids": [20]}]
    positions = torch.tensor([1, 2, 3, 4])
    shared = batch(rows, V, slots=torch.zeros(4, dtype=torch.int64), positions=positions, max_position=4)
    result = kept(stage("mask", V).run(torch.zeros(4, V), shared))
    assert result == [allowed_ids({**rows[0], "position": int(position)}) for position in positions]


def test_tokens_after_the_position_are_not_seen() -> None:
    row = {"prompt": [1], "output": [5, 9, 9], "bad_words": [[9, 7], [5, 8]], "position": 2}
    assert survivors([row]) == [[token for token in range(V) if token != 8]]


def test_masked_logits_may_hold_anything() -> None:
    logits = torch.zeros(1, V)
    logits[0, 66:] = float("nan")
    assert kept(stage("mask", V).run(logits, batch([{}], V, token_limit=66))) == [list(range(66))]


def test_no_rows() -> None:
    assert stage("mask", V).run(torch.zeros(0, V), batch([], V)).shape == (0, V)


small = st.integers(0, 3)
row_strategy = st.fixed_dictionaries(
    {
        "prompt": st.lists(small, min_size=1, max_size=4),
        "output": st.lists(small, max_size=4),
        "min_end": st.integers(0, 8),
        "stop_ids": st.lists(st.integers(0, V - 1), max_size=3),
        "bad_words": st.lists(st.lists(small, min_size=1, max_size=4), max_size=4),
    },
    optional={
        "allowed": st.lists(st.integers(0, V - 1), max_size=20, unique=True),
        "grammar": st.lists(st.integers(0, V - 1), max_size=20, unique=True),
    },
)


@settings(max_examples=60)
@given(st.lists(row_strategy, min_size=1, max_size=4), st.integers(1, V))
def test_all_rules_together_equal_plain_python(rows: list[dict[str, Any]], limit: int) -> None:
    assert survivors(rows, token_limit=limit) == [allowed_ids(row, limit) for row in rows]
