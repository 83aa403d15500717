"""Routing and the local exchange, against a dense computation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from reference_support import operator

from deepinfer_core.api import MoeExchangeRequest, RouteRequest

EXPERTS, TOP_K = 6, 3


def request(**changes: Any) -> RouteRequest:
    fields: dict[str, Any] = {
        "experts": EXPERTS,
        "top_k": TOP_K,
        "scoring": "sqrtsoftplus",
        "normalise": True,
        "scale": 1.5,
    }
    return RouteRequest(**(fields | changes))


def score(scoring: str, row: list[float]) -> list[float]:
    match scoring:
        case "sigmoid":
            return [1 / (1 + math.exp(-x)) for x in row]
        case "softmax":
            total = sum(math.exp(x) for x in row)
            return [math.exp(x) / total for x in row]
    return [math.sqrt(math.log1p(math.exp(x))) for x in row]


@pytest.mark.parametrize("scoring", ["sqrtsoftplus", "sigmoid", "softmax"])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_choice_and_weights(scoring: str, normalise: bool, biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, EXPERTS, generator=generator)
    bias = torch.randn(EXPERTS, generator=generator) if biased else None
    op = operator(request(scoring=scoring, normalise=normalise, bias=biased))
    ids, weights = op.run(logits, bias)
    for row in range(9):
        scores = score(scoring, logits[row].tolist())
        ranked = [s + (float(bias[e]) if bias is not None else 0) for e, s in enumerate(scores)]
        chosen = sorted(sorted(range(EXPERTS), key=lambda e: (-ranked[e], e))[:TOP_K])
        total = sum(scores[e] for e in chosen) if normalise else 1.0
        assert ids[row].tolist() == chosen
        assert weights[row].tolist() == pytest.approx([scores[e] / total * 1.5 for e in chosen], rel=1e-5)


def test_a_bias_never_changes_weights() -> None:
    logits = torch.zeros(1, EXPERTS)
    bias = torch.tensor([0.0, 0, 0, 9, 8, 7])
    ids, weights = operator(request(bias=True)).run(logits, bias)
    assert ids.tolist() == [[3, 4, 5]]
    assert weights.tolist() == [pytest.approx([0.5] * 3)]


def test_given_experts_keep_their_own_weights() -> None:
    logits = torch.tensor([[0.0, 1, 2, 3, 4, 5]])
    ids, weights = operator(request(given=True)).run(logits, given=torch.tensor([[5, 0, 2]], dtype=torch.int32))
    scores = score("sqrtsoftplus", [0.0, 2.0, 5.0])
    assert ids.tolist() == [[0, 2, 5]]
    assert weights[0].tolist() == pytest.approx([s / sum(scores) * 1.5 for s in scores])


def test_counts_add_up_over_calls() -> None:
    counts = torch.zeros(EXPERTS + 1, dtype=torch.int64)
    op = operator(request(given=True))
    op.run(torch.zeros(2, EXPERTS), given=torch.tensor([[0, 1, 2], [0, 2, 4]]), counts=counts)
    op.run(torch.zeros(1, EXPERTS), given=torch.tensor([[0, 1, 5]]), counts=counts)
    op.run(torch.zeros(0, EXPERTS), given=torch.zeros(0, 3, dtype=torch.int64), counts=counts)
    assert counts.tolist() == [3, 2, 2, 0, 1, 1, 0]


def test_nan_scores_lose_and_weigh_nothing() -> None:
    nan = float("nan")
    logits = torch.tensor([[nan, 1.0, nan, -90.0, 2.0, nan], [nan, nan, nan, 0.0, nan, nan]])
    counts = torch.zeros(EXPERTS + 1, dtype=torch.int64)
    ids, weights = operator(request()).run(logits, counts=counts)
    assert ids.tolist() == [[1, 3, 4], [0, 1, 3]]
    assert weights[1].tolist() == pytest.approx([0.0, 0.0, 1.5])
    assert weights.isfinite().all()
    assert counts[-1] == 0


@pytest.mark.parametrize("scoring", ["sqrtsoftplus", "sigmoid", "softmax"])
def test_a_row_of_nan_goes_to_the_lowest_ids_with_equal_weights_and_is_counted(scoring: str) -> None:
    counts = torch.zeros(EXPERTS + 1, dtype=torch.int64)
    logits = torch.stack((torch.full((EXPERTS,), float("nan")), torch.zeros(EXPERTS)))
    ids, weights = operator(request(scoring=scoring)).run(logits, counts=counts)
    assert ids.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert weights[0].tolist() == pytest.approx([0.5] * 3)
    assert counts[-1] == 1


def test_scores_of_nothing_give_finite_weights() -> None:
    ids, weights = operator(request()).run(torch.full((1, EXPERTS), -1000.0))
    assert ids.tolist() == [[0, 1, 2]]
    assert weights.isfinite().all()


def exchange() -> Any:
    return operator(MoeExchangeRequest(experts=EXPERTS, top_k=TOP_K, hidden=4, dtype="float32"))


def test_dispatch_sorts_and_combine_adds_up() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 4, generator=generator)
    ids = torch.stack([torch.randperm(5, generator=generator)[:TOP_K].sort().values for _ in range(7)])
    weights = torch.rand(7, TOP_K, generator=generator)
    op = exchange()
    sent = op.dispatch(x, ids, weights)
    assert sent.offsets.tolist()[0] == 0
    assert sent.offsets.tolist()[-1] == len(sent.rows) == 7 * TOP_K
    assert sent.offsets[5] == sent.offsets[6]
    outputs = torch.empty_like(sent.rows)
    for expert in range(EXPERTS):
        rows = slice(int(sent.offsets[expert]), int(sent.offsets[expert + 1]))
        outputs[rows] = sent.rows[rows] * (expert + 1) * sent.weights[rows, None]
    combined = op.combine(outputs, sent.handle)
    for token in range(7):
        wanted = sum(x[token] * (int(e) + 1) * w for e, w in zip(ids[token], weights[token], strict=True))
        assert torch.allclose(combined[token], wanted, atol=1e-6)


def test_combine_accumulates_in_float32() -> None:
    op = exchange()
    sent = op.dispatch(torch.ones(1, 4).bfloat16(), torch.tensor([[0, 1, 2]]), torch.ones(1, TOP_K))
    outputs = torch.tensor([[256.0], [1.0], [1.0]]).expand(3, 4).bfloat16()
    assert op.combine(outputs, sent.handle).tolist() == [[258.0] * 4]


def test_no_rows() -> None:
    op = exchange()
    ids, weights = operator(request()).run(torch.zeros(0, EXPERTS))
    sent = op.dispatch(torch.zeros(0, 4), ids, weights)
    assert sent.rows.shape == (0, 4)
    assert sent.offsets.tolist() == [0] * (EXPERTS + 1)
    assert op.combine(torch.zeros(0, 4), sent.handle).shape == (0, 4)
