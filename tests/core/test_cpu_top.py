"""The host's top-k, top-p and log-probabilities against the reference, which sorts every row."""

from __future__ import annotations

import random
from typing import Any

import pytest
import reference_support
import torch
from cpu_support import normal, stage
from reference_support import batch, kept

from deepinfer_core.cpu import top

NAN, INF = float("nan"), float("inf")
SIZES = [1, 2, 7, 300, 3001]


def both(name: str, logits: torch.Tensor, rows: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    step = batch(rows, logits.shape[1])
    expected = reference_support.stage(name, logits.shape[1]).run(logits.clone(), step)
    return stage(name, logits.shape[1]).run(logits.clone(), step), expected


def tables(vocab_size: int) -> list[torch.Tensor]:
    """Plain, peaked, flat, and full of equal values; some already filtered."""
    base = normal(6, vocab_size, seed=vocab_size)
    filtered = base.clone()
    filtered[normal(6, vocab_size, seed=1) > 0.5] = -INF
    return [base, base * 10, base * 0.01, (base * 2).round(), filtered, torch.zeros(6, vocab_size)]


@pytest.mark.parametrize("vocab_size", SIZES)
def test_top_k_keeps_what_the_reference_keeps(vocab_size: int) -> None:
    choices = [0, -1, 1, 2, 40, vocab_size - 1, vocab_size, vocab_size + 1]
    source = random.Random(vocab_size)
    for logits in tables(vocab_size):
        found, expected = both("top_k", logits, [{"top_k": source.choice(choices)} for _ in logits])
        assert torch.equal(found, expected)


@pytest.mark.parametrize("vocab_size", SIZES)
def test_top_p_keeps_what_the_reference_keeps(vocab_size: int) -> None:
    """Seeds are fixed: a cumulated probability within a rounding of top_p could fall on either side."""
    choices = [1.0, 0.99, 0.9, 0.5, 0.1, 1e-6, 0.0]
    source = random.Random(vocab_size)
    for logits in tables(vocab_size):
        found, expected = both("top_p", logits, [{"top_p": source.choice(choices)} for _ in logits])
        assert torch.equal(found, expected)


def test_top_k_beyond_the_selection_is_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "LARGEST_SELECTION", 16)
    found, expected = both("top_k", normal(3, 100, seed=1), [{"top_k": k} for k in (5, 17, 90)])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("looks", [(4,), (4, 16)])
def test_a_wide_nucleus_is_found_beyond_the_looks(monkeypatch: pytest.MonkeyPatch, looks: tuple[int, ...]) -> None:
    monkeypatch.setattr(top, "LOOKS", looks)
    rows = [{"top_p": p} for p in (0.999, 0.05, 1.0, 0.6)]
    found, expected = both("top_p", normal(4, 200, seed=1), rows)
    assert torch.equal(found, expected)
    assert [len(ids) for ids in kept(found)][1] < 4


def test_a_row_is_cut_the_same_alone_and_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "LOOKS", (8,))
    logits = normal(5, 300, seed=3)
    rows = [{"top_p": p, "top_k": k} for p, k in ((0.9, 5), (0.2, 0), (1.0, 50), (0.999, 1), (0.5, 299))]
    for name in ("top_k", "top_p"):
        together, _ = both(name, logits, rows)
        for index, row in enumerate(rows):
            alone, _ = both(name, logits[index : index + 1], [row])
            assert torch.equal(alone[0], together[index])


def test_rows_that_are_off_come_back_bit_for_bit() -> None:
    logits = normal(3, 50, seed=1)
    for name in ("top_k", "top_p"):
        found, _ = both(name, logits, [{}, {"top_k": 3, "top_p": 0.3}, {}])
        assert torch.equal(found[[0, 2]], logits[[0, 2]])


@pytest.mark.parametrize("name", ["top_k", "top_p"])
def test_a_broken_row_keeps_its_mark_and_touches_no_other(name: str) -> None:
    row = {"top_k": 4, "top_p": 0.5}
    logits = normal(5, 60, seed=1)
    clean, _ = both(name, logits, [row] * 5)
    logits[1, 30], logits[2, 31], logits[3] = NAN, INF, -INF
    found, _ = both(name, logits, [row] * 5)
    assert torch.equal(found[[0, 4]], clean[[0, 4]])
    assert found[1].isnan().any()
    assert (found[2] == INF).any()
    assert (found[3] == -INF).all()


@pytest.mark.parametrize("name", ["top_k", "top_p"])
def test_no_rows(name: str) -> None:
    assert stage(name, 9).run(torch.zeros(0, 9), batch([], 9)).shape == (0, 9)


# ---- log-probabilities


def logprobs(logits: torch.Tensor, ids: list[int], k: int) -> None:
    vocab_size = logits.shape[1]
    kept_logits = logits.clone()
    found = stage("logprobs", vocab_size).run(logits, torch.tensor(ids, dtype=torch.int64), k)
    expected = reference_support.stage("logprobs", vocab_size).run(logits, torch.tensor(ids, dtype=torch.int64), k)
    assert torch.equal(logits.nan_to_num(7.0), kept_logits.nan_to_num(7.0))
    for name in ("chosen", "rank", "top_ids", "top"):
        assert torch.equal(getattr(found, name).nan_to_num(7), getattr(expected, name).nan_to_num(7)), name


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("k", [0, 1, 5, 3000, 4000])
def test_log_probabilities_equal_the_reference(vocab_size: int, k: int) -> None:
    source = random.Random(k)
    for logits in tables(vocab_size):
        logprobs(logits, [source.randrange(-1, vocab_size) for _ in logits], k)


def test_log_probabilities_of_broken_rows() -> None:
    logits = normal(4, 40, seed=1)
    logits[1, 3], logits[2] = NAN, -INF
    logprobs(logits, [3, 4, -1, 39], 5)


def test_log_probabilities_of_no_rows() -> None:
    logprobs(torch.zeros(0, 9), [], 3)
