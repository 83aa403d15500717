"""The region from attention to attention: the errors of each part go through those behind it.

Two bounds are carried along. The *worst* adds all magnitudes up, and after four products is larger than the results.
The *spread* takes a rounding for a random number within its bound, independent of the others, as ``gamma`` does
(:mod:`deepinfer_core.conformance.tolerance`): sums of such numbers, weighted, add up in squares. Where two terms hang
on the same roundings, their spreads are added. ``LAMBDA`` spreads are a bound; the smaller of both holds. Weights are
drawn at random, so that roundings which reach a result on many ways do not meet there with one sign.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, get_args

import attrs
import torch

from deepinfer_core.api import BetweenAttentionRequest, BetweenPart, BetweenWeights
from deepinfer_core.conformance.case import Case
from deepinfer_core.conformance.tolerance import FUNCTION, LAMBDA, U32, gamma, rounding

from .gemm import stored_weight
from .listing import operation_cases, other_dtypes
from .operation import Operation, Put, Tensors, normal

PARTS: tuple[BetweenPart, ...] = get_args(BetweenPart)
SLOPE = 1.1
"""No less than the derivative of silu anywhere."""


@attrs.frozen(eq=False)
class Off:
    """Values in float64, and by how much a right operator's may differ from them: at the worst, and by spread."""

    values: torch.Tensor
    worst: torch.Tensor
    spread: torch.Tensor

    @classmethod
    def exact(cls, values: torch.Tensor) -> Off:
        return cls(values, torch.zeros_like(values), torch.zeros_like(values))

    @property
    def bound(self) -> torch.Tensor:
        return torch.minimum(self.worst, LAMBDA * self.spread)

    def rounded(self, own: torch.Tensor) -> Off:
        """With an error of its own, of at most this."""
        return Off(self.values, self.worst + own, (self.spread.square() + own.square()).sqrt())


class BetweenAttention(Operation):
    """``run``, with a layer behind it."""

    overwritten: ClassVar[frozenset[str]] = frozenset({"residual"})
    last: ClassVar[bool] = False

    def __init__(self, dtype: str, variant: str = "", **fields: Any) -> None:
        given = {"hidden": 128, "attended": 64, "width": 96, "merged": 160, "eps": 1e-5}
        self.request = BetweenAttentionRequest(**(given | {"dtype": dtype, "weight_dtype": dtype} | fields))
        self.variant = variant

    def sample(self, rows: int, draw: torch.Generator) -> Tensors:
        r = self.request
        residual = normal(draw, rows, r.hidden)
        attended = normal(draw, rows, r.attended)
        # In row 2 both are so small that eps decides: an eps in the wrong place shows there.
        residual[2:3] *= r.eps**0.5 / 4
        attended[2:3] *= r.eps**0.5 / 4
        return {"attended": attended.to(self.dtype), "residual": residual.to(self.dtype)}

    def constants(self, draw: torch.Generator) -> Mapping[str, Any]:
        r = self.request
        found: dict[str, Any] = {name: normal(draw, r.hidden, dtype=self.dtype) for name in ("norm", "next_norm")}
        for part in PARTS:
            product = r.gated.linear if part == "gate_up" else getattr(r, part)
            weight = stored_weight(draw, product.out_features, product.in_features, r.weight_dtype)
            found[part] = list(weight.chunk(2))
            if product.bias:
                found[f"{part}_bias"] = normal(draw, product.out_features, dtype=self.dtype)
        return found

    def prepare(self, op: Any, constants: Mapping[str, Any], put: Put) -> Mapping[str, Any]:
        found = {name: put(constants[name]) for name in ("norm", "next_norm")}
        for part in PARTS:
            bias = constants.get(f"{part}_bias")
            found[part] = op.prepare(part, constants[part], None if bias is None else put(bias))
        return found

    def call(self, op: Any, inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        given = {name: weights[name] for name in ("attention_out", "norm", "gate_up", "down", "next_norm")}
        behind = BetweenWeights(next_qkv=None if self.last else weights["qkv"], **given)
        rows, total = op.run(inputs["attended"], inputs["residual"], behind)
        return {"sum": total, "y": rows}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {"sum": self.dtype, "y": self.dtype}

    def bounds(self, inputs: Tensors, constants: Mapping[str, Any], expected: Tensors) -> Tensors:
        residual, attended = Off.exact(inputs["residual"]), Off.exact(inputs["attended"])
        first = self._sum(residual, self._product(attended, "attention_out", constants))
        gated = self._gate(self._product(self._norm(first, constants["norm"]), "gate_up", constants))
        second = self._sum(first, self._product(gated, "down", constants))
        found = self._norm(second, constants["next_norm"])
        if not self.last:
            found = self._product(found, "qkv", constants)
        return {"sum": second.bound, "y": found.bound}

    def _product(self, x: Off, part: BetweenPart, constants: Mapping[str, Any]) -> Off:
        weights = torch.cat([weight.to(torch.float64) for weight in constants[part]])
        y, sums = x.values @ weights.T, (x.values.abs() + x.worst) @ weights.abs().T
        if f"{part}_bias" in constants:
            bias = constants[f"{part}_bias"].to(torch.float64)
            y, sums = y + bias, sums + bias.abs()
        through = Off(y, x.worst @ weights.abs().T, (x.spread.square() @ weights.square().T).sqrt())
        return through.rounded(gamma(weights.shape[1]) * sums).rounded(rounding(y, self.dtype))

    def _sum(self, x: Off, y: Off) -> Off:
        total = Off(x.values + y.values, x.worst + y.worst, x.spread + y.spread)
        return total.rounded(rounding(total.values, self.dtype))

    def _norm(self, x: Off, weight: torch.Tensor) -> Off:
        """Of each channel, and of the whole row through the statistic."""
        size, hidden = x.values.abs(), self.request.hidden
        square = size.square().mean(-1, keepdim=True) + self.request.eps
        factor = weight.to(torch.float64).abs() / square.sqrt()
        y = x.values / square.sqrt() * weight.to(torch.float64)
        moved = (2 * size * x.worst + x.worst.square()).mean(-1, keepdim=True) / square
        swayed = (2 * size * x.spread).square().sum(-1, keepdim=True).sqrt() / hidden / square
        worst = factor * (x.worst + (size + x.worst) * moved)
        through = Off(y, worst, factor * (x.spread + size * swayed))
        own = (gamma(hidden) / 2 + FUNCTION * U32) * y.abs()
        return through.rounded(own).rounded(rounding(y, self.dtype))

    def _gate(self, x: Off) -> Off:
        (gate, up), worst, spread = x.values.chunk(2, 1), x.worst.chunk(2, 1), x.spread.chunk(2, 1)
        if self.request.limit is not None:
            gate, up = gate.clamp(max=self.request.limit), up.clamp(-self.request.limit, self.request.limit)
        opened = torch.nn.functional.silu(gate)
        y = opened * up
        found = Off(
            y,
            SLOPE * worst[0] * (up.abs() + worst[1]) + opened.abs() * worst[1],
            SLOPE * spread[0] * (up.abs() + LAMBDA * spread[1]) + opened.abs() * spread[1],
        )
        return found.rounded((FUNCTION + 2 * gate.abs()) * U32 * y.abs()).rounded(rounding(y, self.dtype))


class LastBetween(BetweenAttention):
    """``run`` behind the last layer."""

    last: ClassVar[bool] = True

    def __init__(self, dtype: str, variant: str = "last", **fields: Any) -> None:
        super().__init__(dtype, variant, **fields)


class FirstBetween(BetweenAttention):
    """``first``, which leaves the residual alone."""

    overwritten: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, dtype: str, variant: str = "first", **fields: Any) -> None:
        super().__init__(dtype, variant, **fields)

    def sample(self, rows: int, draw: torch.Generator) -> Tensors:
        return {"residual": BetweenAttention.sample(self, rows, draw)["residual"]}

    def call(self, op: Any, inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        return {"y": op.first(inputs["residual"], weights["next_norm"], weights["qkv"])}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {"y": self.dtype}

    def bounds(self, inputs: Tensors, constants: Mapping[str, Any], expected: Tensors) -> Tensors:
        residual = Off.exact(inputs["residual"])
        return {"y": self._product(self._norm(residual, constants["next_norm"]), "qkv", constants).bound}


def cases(dtype: str) -> Iterator[Case]:
    """Every case of this operator. A backend that does not offer it is refused, which is no failure."""
    optional: dict[str, Any] = {"required": False}
    kinds: tuple[Any, ...] = (BetweenAttention, LastBetween, FirstBetween)
    for kind in kinds:
        yield from operation_cases(partial(kind, dtype), dtype=dtype, tier="serves", without=("extremes",), **optional)
    for variant, changes in (
        ("bias", {"attention_bias": True, "mlp_bias": True}),
        ("limit", {"limit": 0.5}),
        ("odd", {"hidden": 200, "attended": 72, "width": 100, "merged": 104}),
    ):
        made = partial(BetweenAttention, dtype, variant, **changes)
        yield from operation_cases(made, dtype=dtype, tier="serves", only=("odd_rows", "one_row"), **optional)
    for other in other_dtypes(dtype):
        for kind in kinds:
            yield from operation_cases(partial(kind, other), dtype=other, tier="serves", only=("odd_rows",), **optional)
