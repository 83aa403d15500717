"""Routing to experts, and the exchange of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from deepinfer_core.api import MoeExchangeRequest, RouteRequest, Scoring
from deepinfer_core.conformance.case import Case, Mismatch
from deepinfer_core.conformance.compare import check_close, check_equal
from deepinfer_core.conformance.memory import check_guards, guard, poisoned_allocations
from deepinfer_core.conformance.target import Target
from deepinfer_core.conformance.tolerance import FUNCTION, U32, gamma, rounding

from .listing import operation_cases
from .operation import Operation, Tensors, generator, normal


class Route(Operation):
    """Logits keep their distance, so that the choice is plain; ties are exact, and broken rows part of the contract."""

    def __init__(
        self,
        scoring: Scoring,
        variant: str = "",
        *,
        experts: int = 16,
        top_k: int = 4,
        bias: bool = False,
        given: bool = False,
        normalise: bool = True,
    ) -> None:
        self.request = RouteRequest(
            experts=experts, top_k=top_k, scoring=scoring, normalise=normalise, scale=1.5, bias=bias, given=given
        )
        self.variant = variant

    def sample(self, rows: int, draw: torch.Generator) -> Tensors:
        r = self.request
        order = torch.argsort(torch.rand(rows, r.experts, generator=draw), dim=1)
        logits = (order.float() - r.experts / 2) * 0.375
        logits[1:2] = 0.5  # all equal: lowest ids
        logits[2:3] = logits[2:3].round()  # some equal
        logits[3:4] = float("nan")
        logits[4:5, 2] = float("nan")
        inputs = {"logits": logits}
        if r.given:
            inputs["given"] = torch.argsort(torch.rand(rows, r.experts, generator=draw), dim=1)[:, : r.top_k].clone()
        return inputs

    def constants(self, draw: torch.Generator) -> Mapping[str, Any]:
        # Multiples of no logit's distance: scores plus bias keep apart too.
        return {"bias": torch.arange(self.request.experts).flip(0) * 0.011} if self.request.bias else {}

    def call(self, op: Any, inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        more = {"bias": weights["bias"]} if self.request.bias else {}
        if self.request.given:
            more["given"] = inputs["given"]
        ids, found = op.run(inputs["logits"], **more)
        return {"ids": ids, "weights": found}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {"ids": torch.int64, "weights": torch.float32}

    def bounds(self, inputs: Tensors, constants: Mapping[str, Any], expected: Tensors) -> Tensors:
        r, weights = self.request, expected["weights"]
        spread = 2 * inputs["logits"].nan_to_num().abs().amax(1, keepdim=True)
        score = (FUNCTION + 2 * spread) * U32 + gamma(r.experts)
        return {
            "ids": torch.zeros_like(expected["ids"]),
            "weights": (2 * score + gamma(r.top_k) + 2 * U32) * weights.abs() + rounding(weights, torch.float32),
        }


def _counts(target: Target) -> str:
    """``counts`` is added to: rows sent to each expert, and last the rows of NaN."""
    operation = Route("sigmoid")
    chosen = target.choose(operation.request)
    inputs = operation.sample(37, generator("counts"))
    kept = target.work(lambda: {"counts": guard(torch.arange(17), target.put)})
    target.work(lambda: chosen.operator.run(target.put(inputs["logits"]), counts=kept["counts"].tensor))
    label = f"moe.route by {chosen.label}"
    check_guards(label, kept, frozenset({"counts"}), target.get)
    ids = operation.call(target.oracle(operation.request), inputs, {})["ids"]
    added = torch.bincount(ids.flatten(), minlength=16)
    expected = torch.arange(17) + torch.cat((added, torch.tensor([1])))
    check_equal(f"{label}, counts", target.get(kept["counts"].tensor), expected)
    return chosen.label


HIDDEN, EXPERTS = 32, 6
Ids = Callable[[int, torch.Generator], torch.Tensor]


def _any_experts(rows: int, draw: torch.Generator) -> torch.Tensor:
    return torch.sort(torch.argsort(torch.rand(rows, EXPERTS, generator=draw), 1)[:, :2], 1).values


def _two_experts(rows: int, draw: torch.Generator) -> torch.Tensor:
    """All rows to experts 1 and 4: the others have none."""
    return torch.tensor([[1, 4]]).expand(rows, 2).clone()


def _round_trip(rows: int, ids_of: Ids, dtype: str, target: Target) -> str:
    """Every row reaches its experts once, with its weight, and what they answer is added up for its token."""
    draw = generator(f"exchange {rows}")
    request = MoeExchangeRequest(
        experts=EXPERTS, top_k=2, hidden=HIDDEN, dtype=dtype, device_type=target.device.info.type
    )
    chosen = target.choose(request)
    label = f"moe.exchange by {chosen.label}"
    x = normal(draw, rows, HIDDEN, dtype=getattr(torch, dtype))
    ids, weights = ids_of(rows, draw), torch.rand(rows, 2, generator=draw)

    def dispatch() -> Any:
        kept = {name: guard(value, target.put) for name, value in (("x", x), ("ids", ids), ("weights", weights))}
        return chosen.operator.dispatch(*(one.tensor for one in kept.values())), kept

    with poisoned_allocations():
        sent, kept = target.work(dispatch)
    check_guards(f"{label}, dispatch", kept, frozenset(), target.get)
    got, shares, offsets = (target.get(part) for part in (sent.rows, sent.weights, sent.offsets))
    _check_dispatched(f"{label}, dispatch", x, ids, weights, got, shares, offsets)
    owner = torch.repeat_interleave(torch.arange(EXPERTS), offsets.diff())
    answers = (got.double() * (owner[:, None] + 1) * shares[:, None]).to(x.dtype)
    with poisoned_allocations():
        combined = target.get(target.work(lambda: chosen.operator.combine(target.put(answers), sent.handle)))
    expected = (x.double()[:, None] * (ids[:, :, None] + 1) * weights[:, :, None].double()).sum(1)
    size = (x.double().abs()[:, None] * (ids[:, :, None] + 1) * weights[:, :, None].double()).sum(1)
    bound = rounding(size, x.dtype) + gamma(2) * size
    if combined.dtype != torch.float32 or tuple(combined.shape) != (rows, HIDDEN):
        raise Mismatch(
            f"{label}, combine: found {tuple(combined.shape)} {combined.dtype}, expected {(rows, HIDDEN)} float32"
        )
    check_close(f"{label}, combine", combined, expected, bound)
    return chosen.label


def _check_dispatched(
    label: str,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    got: torch.Tensor,
    shares: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
    check_equal(f"{label}, offsets", offsets, torch.cat((counts.new_zeros(1), counts.cumsum(0))))
    for expert in range(EXPERTS):
        token, place = (ids == expert).nonzero(as_tuple=True)
        rows = slice(int(offsets[expert]), int(offsets[expert + 1]))
        # Which row of an expert comes first is the operator's own affair: compare in order of the weights.
        mine, wanted = shares[rows].argsort(), weights[token, place].argsort()
        check_equal(f"{label}, weights of expert {expert}", shares[rows][mine], weights[token, place][wanted])
        check_equal(f"{label}, rows of expert {expert}", got[rows][mine], x[token][wanted])


def _counted_once(target: Target) -> str:
    """Token 1.0, experts 0 and 3 of four, halves: 0.5 * 1 + 0.5 * 4 = 2.5; with expert 0 counted twice it is 3.0."""
    request = MoeExchangeRequest(experts=4, top_k=2, hidden=1, dtype="float32", device_type=target.device.info.type)
    chosen = target.choose(request)
    x, ids, weights = torch.ones(1, 1), torch.tensor([[0, 3]]), torch.full((1, 2), 0.5)
    sent = target.work(lambda: chosen.operator.dispatch(target.put(x), target.put(ids), target.put(weights)))
    rows, shares, offsets = (target.get(part) for part in (sent.rows, sent.weights, sent.offsets))
    owner = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
    answers = rows * (owner[:, None] + 1) * shares[:, None]
    combined = target.get(target.work(lambda: chosen.operator.combine(target.put(answers), sent.handle)))
    check_equal(f"moe.exchange by {chosen.label}, combine", combined, torch.tensor([[2.5]]))
    return chosen.label


def _steps_apart(target: Target) -> str:
    """Twenty steps without a row between two with rows: nothing is left over from one to the next."""
    for _ in range(20):
        _round_trip(0, _any_experts, "float32", target)
    return _round_trip(5, _any_experts, "float32", target)


def cases(dtype: str) -> Iterator[Case]:
    """Every case of these operators."""
    routes: tuple[tuple[str, Callable[[], Operation]], ...] = (
        ("softmax", partial(Route, "softmax", "softmax")),
        ("sigmoid", partial(Route, "sigmoid", "sigmoid")),
        ("sqrtsoftplus", partial(Route, "sqrtsoftplus", "sqrtsoftplus")),
        ("bias", partial(Route, "sqrtsoftplus", "bias", bias=True)),
        ("given", partial(Route, "sqrtsoftplus", "given", given=True)),
        ("not_normalised", partial(Route, "sigmoid", "not_normalised", normalise=False)),
    )
    for _, make in routes:
        yield from operation_cases(
            make, dtype="float32", tier="full", without=("broken_rows", "extremes", "strided_rows")
        )
    checks: tuple[tuple[str, Callable[[Target], str]], ...] = (
        ("moe.route/float32/counts", _counts),
        (f"moe.exchange/{dtype}/round_trip", partial(_round_trip, 37, _any_experts, dtype)),
        (f"moe.exchange/{dtype}/one_row", partial(_round_trip, 1, _any_experts, dtype)),
        (f"moe.exchange/{dtype}/zero_rows", partial(_round_trip, 0, _any_experts, dtype)),
        (f"moe.exchange/{dtype}/experts_without_rows", partial(_round_trip, 37, _two_experts, dtype)),
        (f"moe.exchange/{dtype}/largest_rows", partial(_round_trip, 512, _any_experts, dtype)),
        ("moe.exchange/float32/counted_once", _counted_once),
        ("moe.exchange/float32/steps_without_rows", _steps_apart),
    )
    for name, check in checks:
        yield Case(id=name, family="moe", tier="full", check=check, required=True)
