"""Routing and the exchange of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from invariance import MOST_ROWS, check_company, normal, operator, reference_operator

from deepinfer_core.api import MoeExchangeRequest, RouteRequest, Scoring

DEMANDS = frozenset({"batch_invariant"})
SCORINGS: tuple[Scoring, ...] = ("softmax", "sigmoid", "sqrtsoftplus")
ROUTES = ("route", "route_rows_alone")


def route(scoring: Scoring, experts: int, top_k: int, **changes: Any) -> RouteRequest:
    fields = {"normalise": True, "scale": 1.5, "bias": True, "demands": DEMANDS, **changes}
    return RouteRequest(experts=experts, top_k=min(top_k, experts), scoring=scoring, **fields)


@pytest.mark.parametrize("provider", ROUTES)
@pytest.mark.parametrize("scoring", SCORINGS)
@settings(max_examples=5)
@given(experts=st.integers(1, 70), top_k=st.integers(1, 9), rows=st.integers(0, MOST_ROWS), seed=st.integers(0, 99))
def test_rows_alone_and_together(
    provider: str, scoring: Scoring, experts: int, top_k: int, rows: int, seed: int
) -> None:
    op = operator(route(scoring, experts, top_k), f"batch_invariance:{provider}")
    logits, bias = normal(rows, experts, seed=seed) * 3, normal(experts, seed=1)
    check_company(lambda picked: op.run(logits[picked], bias), rows, seed)


@settings(max_examples=10)
@given(
    experts=st.integers(1, 40),
    top_k=st.integers(1, 9),
    hidden=st.integers(1, 90),
    rows=st.integers(0, MOST_ROWS),
    seed=st.integers(0, 99),
)
def test_rows_alone_and_together_through_experts(experts: int, top_k: int, hidden: int, rows: int, seed: int) -> None:
    """The sum over a token's experts, whoever else was sent to them."""
    top_k = min(top_k, experts)
    request = MoeExchangeRequest(experts=experts, top_k=top_k, hidden=hidden, dtype="float32", demands=DEMANDS)
    op, x = operator(request, "batch_invariance:local"), normal(rows, hidden, seed=1)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack(
        [torch.randperm(experts, generator=generator)[:top_k].sort().values for _ in range(rows)]
        or [torch.zeros(top_k, dtype=torch.int64)]
    )[:rows]
    weights = torch.rand(rows, top_k, generator=generator)
    scale = normal(experts, hidden, seed=2)

    def run(picked: Any) -> torch.Tensor:
        sent = op.dispatch(x[picked], ids[picked], weights[picked])
        counts = sent.offsets[1:] - sent.offsets[:-1]
        owner = torch.repeat_interleave(torch.arange(experts), counts)
        combined: torch.Tensor = op.combine(sent.rows * sent.weights[:, None] * scale[owner], sent.handle)
        return combined

    check_company(run, rows, seed)
    exact = torch.einsum("tk,th,tkh->th", weights.double(), x.double(), scale[ids].double())
    assert torch.allclose(run(list(range(rows))).double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("rows", [0, 1, 8])
def test_route_equals_the_reference(scoring: Scoring, rows: int) -> None:
    request = route(scoring, 12, 3)
    logits, bias = normal(rows, 12, seed=1), normal(12, seed=2)
    logits[:1] = float("nan")
    logits[1:2, 3] = float("nan")
    logits[2:3] = 0.5  # all equal: the lowest ids that the bias allows
    counts, wanted_counts = torch.zeros(13, dtype=torch.int64), torch.zeros(13, dtype=torch.int64)
    ids, weights = operator(request, "batch_invariance:route").run(logits, bias, counts=counts)
    wanted_ids, wanted = reference_operator(request).run(logits, bias, counts=wanted_counts)
    assert torch.equal(ids, wanted_ids)
    assert torch.allclose(weights, wanted, rtol=1e-5)
    assert torch.equal(counts, wanted_counts)


@pytest.mark.parametrize("rows", [1, 2, 16, 257])
def test_equal_scores_choose_the_lowest_ids_at_every_size(rows: int) -> None:
    op = operator(route("softmax", 8, 2, bias=False), "batch_invariance:route")
    ids, weights = op.run(torch.zeros(rows, 8))
    assert ids.tolist() == [[0, 1]] * rows
    assert torch.equal(weights, torch.full((rows, 2), 0.75))


def test_given_experts_are_weighed_only() -> None:
    request = route("sqrtsoftplus", 8, 2, bias=False, given=True)
    logits, given_ids = normal(5, 8, seed=1), torch.tensor([[5, 1]] * 5)
    ids, weights = operator(request, "batch_invariance:route").run(logits, given=given_ids)
    wanted_ids, wanted = reference_operator(request).run(logits, given=given_ids)
    assert torch.equal(ids, wanted_ids)
    assert torch.allclose(weights, wanted, rtol=1e-5)
