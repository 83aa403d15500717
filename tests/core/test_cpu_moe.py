"""The host's routing and exchange against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpu_support import HOST
from reference_support import operator

from deepinfer_core.api import BuildContext, MoeExchangeRequest, OpRequest, RouteRequest
from deepinfer_core.cpu import plugin
from deepinfer_core.cpu.moe import LocalExchange, Route

EXPERTS, TOP_K, HIDDEN = 8, 3, 4


def context() -> BuildContext:
    return BuildContext(
        device=torch.device("cpu"),
        max_tokens=64,
        max_requests=8,
        max_model_len=64,
        num_threads=1,
        settings=None,
        reference=operator,
    )


def route(**changes: Any) -> RouteRequest:
    fields: dict[str, Any] = {
        "experts": EXPERTS,
        "top_k": TOP_K,
        "scoring": "sqrtsoftplus",
        "normalise": True,
        "scale": 1.5,
    }
    return RouteRequest(**(fields | changes))


def same_route(request: RouteRequest, logits: torch.Tensor, **arguments: Any) -> None:
    ours, theirs = (torch.zeros(EXPERTS + 1, dtype=torch.int64) for _ in range(2))
    ids, weights = Route(request, context()).run(logits, counts=ours, **arguments)
    wanted_ids, wanted = operator(request).run(logits, counts=theirs, **arguments)
    assert torch.equal(ids, wanted_ids)
    assert torch.allclose(weights, wanted, rtol=1e-5, atol=1e-7)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("rows", [0, 1, 9])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_route(rows: int, normalise: bool, biased: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, EXPERTS, generator=generator) * 4
    bias = torch.randn(EXPERTS, generator=generator) if biased else None
    same_route(route(normalise=normalise, bias=biased), logits, bias=bias)


def test_route_of_given_experts() -> None:
    logits = torch.randn(2, EXPERTS, generator=torch.Generator().manual_seed(0))
    same_route(route(given=True), logits, given=torch.tensor([[5, 0, 2], [7, 6, 1]]))


@pytest.mark.parametrize("value", [0.0, -1000.0, 60.0])
def test_equal_scores(value: float) -> None:
    same_route(route(), torch.full((3, EXPERTS), value))


def test_nan_is_the_references_business() -> None:
    logits = torch.randn(3, EXPERTS, generator=torch.Generator().manual_seed(0))
    logits[1] = float("nan")
    logits[2, 4] = float("nan")
    same_route(route(), logits)


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_exchange(rows: int) -> None:
    request = MoeExchangeRequest(experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, dtype="float32")
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, HIDDEN, generator=generator)
    weights = torch.rand(rows, TOP_K, generator=generator)
    picks = [torch.randperm(EXPERTS, generator=generator)[:TOP_K].sort().values for _ in range(rows)]
    ids = torch.stack(picks) if picks else torch.zeros(0, TOP_K, dtype=torch.int64)
    ours, theirs = LocalExchange(request, context()), operator(request)
    sent, wanted = ours.dispatch(x, ids, weights), theirs.dispatch(x, ids, weights)
    assert torch.equal(sent.rows, wanted.rows)
    assert torch.equal(sent.weights, wanted.weights)
    assert torch.equal(sent.offsets, wanted.offsets)
    outputs = torch.randn(rows * TOP_K, HIDDEN, generator=generator)
    assert torch.allclose(ours.combine(outputs, sent.handle), theirs.combine(outputs, wanted.handle))


@pytest.mark.parametrize(
    "request_", [route(scoring="softmax"), route(scoring="sigmoid"), route(device_type="meta")], ids=str
)
def test_what_it_does_not_serve(request_: OpRequest) -> None:

    (provider,) = [p for p in plugin.deepinfer_moe_communication(HOST) if p.op == "moe.route"]
    verdict = provider.supports(request_)
    assert not verdict
    assert verdict.reason
