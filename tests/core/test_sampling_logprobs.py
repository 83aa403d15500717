"""Log-probabilities of the reference backend."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_support import stage

from deepinfer_core.api import LogprobsResult

INF = float("inf")


def logprobs(logits: torch.Tensor, ids: list[int], k: int) -> LogprobsResult:
    result: LogprobsResult = stage("logprobs", logits.shape[1]).run(logits, torch.tensor(ids, dtype=torch.int64), k)
    return result


def test_values_are_log_softmax() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)) * 4
    exact = logits.double() - logits.double().exp().sum(-1, keepdim=True).log()
    result = logprobs(logits, [0, 7, 299, 8, 8], 300)
    torch.testing.assert_close(result.chosen.double(), exact[torch.arange(5), [0, 7, 299, 8, 8]], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.top.double(), exact.gather(1, result.top_ids), rtol=1e-5, atol=1e-5)


def test_large_logits_do_not_overflow() -> None:
    result = logprobs(torch.tensor([[1e4, 1e4 - 1.0]]), [0], 2)
    assert result.top[0].tolist() == pytest.approx([-math.log1p(math.exp(-1)), -1 - math.log1p(math.exp(-1))], abs=1e-5)


tied_rows = st.lists(
    st.lists(st.sampled_from([-1.0, 0.0, -0.0, 2.0, -INF]), min_size=6, max_size=6).filter(lambda r: max(r) > -INF),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60)
@given(tied_rows, st.integers(0, 6), st.integers(0, 5))
def test_order_and_rank_equal_a_sort(rows: list[list[float]], k: int, chosen: int) -> None:
    result = logprobs(torch.tensor(rows), [chosen] * len(rows), k)
    for index, row in enumerate(rows):
        order = [token for _, token in sorted((-score, token) for token, score in enumerate(row))]
        assert result.top_ids[index].tolist() == order[:k]
        assert int(result.rank[index]) == order.index(chosen) + 1


def test_no_alternatives() -> None:
    result = logprobs(torch.zeros(2, 4), [1, 3], 0)
    assert result.top.shape == result.top_ids.shape == (2, 0)
    assert result.rank.tolist() == [2, 4]


def test_more_alternatives_than_tokens_gives_all() -> None:
    assert logprobs(torch.zeros(1, 4), [0], 9).top_ids.tolist() == [[0, 1, 2, 3]]


def test_a_masked_token_has_probability_zero() -> None:
    result = logprobs(torch.tensor([[0.0, -INF]]), [1], 2)
    assert result.chosen.tolist() == [-INF]
    assert result.top.tolist() == [[0.0, -INF]]


def test_a_failed_draw_has_no_logprob_and_harms_no_neighbour() -> None:
    logits = torch.tensor([[1.0, 2.0], [float("nan"), 0.0], [1.0, 2.0]])
    result = logprobs(logits, [1, -1, 1], 1)
    assert math.isnan(result.chosen[1])
    assert result.rank.tolist() == [1, 0, 1]
    assert result.chosen[0] == result.chosen[2] == logprobs(logits[:1], [1], 1).chosen[0]


@pytest.mark.parametrize("vocab_size", [5, 97, 1031, 70001])
def test_a_row_alone_equals_the_row_among_others(vocab_size: int) -> None:
    logits = torch.randn(7, vocab_size, generator=torch.Generator().manual_seed(1))
    ids = [0, 1, 2, 3, 4, 0, 1]
    together = logprobs(logits, ids, 4)
    for index in range(7):
        alone = logprobs(logits[index : index + 1], ids[index : index + 1], 4)
        assert torch.equal(alone.chosen[0], together.chosen[index])
        assert torch.equal(alone.top[0], together.top[index])


def test_logits_are_left_alone() -> None:
    logits = torch.tensor([[3.0, 1.0]])
    logprobs(logits, [0], 2)
    assert logits.tolist() == [[3.0, 1.0]]


def test_no_rows() -> None:
    result = logprobs(torch.zeros(0, 4), [], 3)
    assert result.chosen.shape == result.rank.shape == (0,)
    assert result.top.shape == result.top_ids.shape == (0, 3)
