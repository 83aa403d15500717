"""A21: an expert that gets no tokens, a step without tokens, and a router that cannot decide."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepinfer_core.api import (
    BuildContext,
    GroupedLinearRequest,
    MoeExchangeRequest,
    OpRequest,
    RouteRequest,
    Scoring,
)
from deepinfer_core.reference.grouped import GroupedLinear
from deepinfer_core.reference.moe import LocalExchange, Route

EXPERTS, HIDDEN = 4, 8


def context() -> BuildContext:
    def no_reference(request: OpRequest) -> Any:
        raise AssertionError(request)

    return BuildContext(
        device=torch.device("cpu"),
        max_tokens=16,
        max_requests=4,
        max_model_len=64,
        num_threads=1,
        settings=None,
        reference=no_reference,
    )


def route(top_k: int, scoring: Scoring) -> Route:
    request = RouteRequest(experts=EXPERTS, top_k=top_k, scoring=scoring, normalise=True, scale=1.0)
    return Route(request, context())


def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """One linear layer of experts, through the operators."""
    exchange = LocalExchange(
        MoeExchangeRequest(experts=EXPERTS, top_k=ids.shape[1], hidden=HIDDEN, dtype="float32"), context()
    )
    request = GroupedLinearRequest(
        groups=EXPERTS,
        in_features=HIDDEN,
        out_features=HIDDEN,
        dtype="float32",
        out_dtype="float32",
        weight_dtype="float32",
    )
    grouped = GroupedLinear(request, context())
    sent = exchange.dispatch(x, ids, weights)
    outputs = grouped.run(sent.rows * sent.weights[:, None], sent.offsets, grouped.prepare([[w] for w in experts]))
    return exchange.combine(outputs, sent.handle)


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is not written shows."""
    full: Any = torch.full

    def empty(shape: Any, **more: Any) -> torch.Tensor:
        filled: torch.Tensor = full(tuple(shape), float("nan"), **more)
        return filled

    monkeypatch.setattr(torch, "empty", empty)


def experts() -> torch.Tensor:
    return torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(0))


def test_all_tokens_to_one_expert() -> None:
    x, weights = torch.randn(2, HIDDEN), torch.tensor([[0.25], [1.0]])
    found = layer(x, torch.zeros(2, 1, dtype=torch.int64), weights, experts())
    assert torch.allclose(found, (x * weights) @ experts()[0].T, atol=1e-6)


def test_some_experts_without_tokens() -> None:
    x = torch.randn(3, HIDDEN)
    ids, weights = torch.tensor([[0, 3], [0, 3], [2, 3]]), torch.rand(3, 2)
    dense = torch.stack([sum(w * experts()[e] @ t for e, w in zip(i, ws, strict=True)) for t, i, ws in
                         zip(x, ids, weights, strict=True)])  # fmt: skip
    found = layer(x, ids, weights, experts())
    assert found.isfinite().all()
    assert torch.allclose(found, dense, atol=1e-5)


def test_no_tokens_at_all() -> None:
    ids, weights = route(2, "softmax").run(torch.zeros(0, EXPERTS))
    assert layer(torch.zeros(0, HIDDEN), ids, weights, experts()).shape == (0, HIDDEN)


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("value", [0.0, -3.0, 12.5])
def test_equal_scores_choose_the_lowest_ids_whatever_the_batch(rows: int, scoring: Scoring, value: float) -> None:
    ids, weights = route(2, scoring).run(torch.full((rows, EXPERTS), value))
    assert ids.tolist() == [[0, 1]] * rows
    assert torch.allclose(weights, torch.full((rows, 2), 0.5))


def test_a_row_of_nan_harms_no_neighbour() -> None:
    logits = torch.randn(3, EXPERTS, generator=torch.Generator().manual_seed(1))
    clean_ids, clean_weights = route(2, "sqrtsoftplus").run(logits)
    logits[1] = float("nan")
    ids, weights = route(2, "sqrtsoftplus").run(logits)
    assert ids[1].tolist() == [0, 1]
    assert torch.equal(ids[[0, 2]], clean_ids[[0, 2]])
    assert torch.equal(weights[[0, 2]], clean_weights[[0, 2]])
