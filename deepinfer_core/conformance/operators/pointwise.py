"""Norms and gated activation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from deepinfer_core.api import RmsNormRequest, SwigluRequest
from deepinfer_core.conformance.case import Case
from deepinfer_core.conformance.tolerance import FUNCTION, U32, gamma, rounding

from .listing import operation_cases, other_dtypes
from .operation import Operation, Tensors, normal


class RmsNorm(Operation):
    """``run``: relative error of the mean of ``hidden`` squares, halved by the root, and of the functions."""

    def __init__(self, dtype: str, hidden: int = 128, eps: float = 1e-5, variant: str = "") -> None:
        self.request = RmsNormRequest(hidden=hidden, eps=eps, dtype=dtype)
        self.variant = variant

    def sample(self, rows: int, draw: torch.Generator) -> Tensors:
        # Row 2 is so small that eps decides: an eps in the wrong place shows there.
        x = normal(draw, rows, self.request.hidden)
        x[2:3] *= self.request.eps**0.5 / 4
        return {"x": x.to(self.dtype)}

    def constants(self, draw: torch.Generator) -> Mapping[str, Any]:
        return {"weight": normal(draw, self.request.hidden, dtype=self.dtype)}

    def call(self, op: Any, inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        return {"y": op.run(inputs["x"], weights["weight"])}

    def bounds(self, inputs: Tensors, constants: Mapping[str, Any], expected: Tensors) -> Tensors:
        y = expected["y"]
        return {"y": (gamma(self.request.hidden) / 2 + FUNCTION * U32) * y.abs() + rounding(y, self.dtype)}

    def extremes(self, rows: int, draw: torch.Generator) -> Tensors | None:
        # Squares must stay within float32, the dtype of the statistics; and within the dtype itself.
        x = normal(draw, rows, self.request.hidden)
        top = 1e4 if self.dtype == torch.float16 else 1e17
        x *= torch.tensor([top, 1.0, 1e-4, 0.0, top, 1e-3, 1.0])[:rows, None]
        return {"x": x.to(self.dtype)}


class HeadNorm(RmsNorm):
    """``run`` over ``[T, heads, hidden]``, as queries and keys are normed."""

    heads = 3

    def sample(self, rows: int, draw: torch.Generator) -> Tensors:
        flat = RmsNorm.sample(self, rows * self.heads, draw)["x"]
        return {"x": flat.view(rows, self.heads, self.request.hidden)}

    def extremes(self, rows: int, draw: torch.Generator) -> Tensors | None:
        return None


class AddRmsNorm(RmsNorm):
    """``add``: the sum is one rounding; the norm is held to that of the sum that was returned."""

    overwritten = frozenset({"residual"})

    def __init__(self, dtype: str, hidden: int = 128, eps: float = 1e-5, variant: str = "add") -> None:
        super().__init__(dtype, hidden, eps, variant)

    def sample(self, rows: int, draw: torch.Generator) -> Tensors:
        x = RmsNorm.sample(self, rows, draw)["x"]
        return {"x": x, "residual": normal(draw, rows, self.request.hidden, dtype=self.dtype)}

    def extremes(self, rows: int, draw: torch.Generator) -> Tensors | None:
        found = RmsNorm.extremes(self, rows, draw)
        return found and {**found, "residual": found["x"].flip(-1).clone()}

    def call(self, op: Any, inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        normed, total = op.add(inputs["x"], inputs["residual"], weights["weight"])
        return {"sum": total, "y": normed}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {"sum": self.dtype, "y": self.dtype}

    def bounds(self, inputs: Tensors, constants: Mapping[str, Any], expected: Tensors) -> Tensors:
        total = expected["sum"]
        own = rounding(total, self.dtype)
        # The sum's rounding goes through the norm: of each channel, and of the whole through the statistic.
        size = total.square().mean(-1, keepdim=True).add(self.request.eps).sqrt()
        weight = constants["weight"].to(torch.float64).abs()
        through = weight * (own + total.abs() * own.amax(-1, keepdim=True) / size) / size
        y = RmsNorm.bounds(self, inputs, constants, expected)["y"]
        return {"sum": own, "y": y + torch.nan_to_num(through)}


class Swiglu(Operation):
    """One exponential whose argument is exact, so its relative error grows with the argument."""

    def __init__(self, dtype: str, width: int = 96, limit: float | None = None, variant: str = "") -> None:
        self.request = SwigluRequest(width=width, dtype=dtype, limit=limit)
        self.variant = variant

    def sample(self, rows: int, draw: torch.Generator) -> Tensors:
        return {"gate_up": normal(draw, rows, 2 * self.request.width, dtype=self.dtype, scale=3.0)}

    def call(self, op: Any, inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        return {"y": op.run(inputs["gate_up"])}

    def bounds(self, inputs: Tensors, constants: Mapping[str, Any], expected: Tensors) -> Tensors:
        y = expected["y"]
        gate = inputs["gate_up"][:, : self.request.width].abs().nan_to_num()
        # Where silu underflows in float32 the product loses what is below its smallest normal number.
        up = inputs["gate_up"][:, self.request.width :].abs().nan_to_num()
        return {"y": (FUNCTION + 2 * gate) * U32 * y.abs() + rounding(y, self.dtype) + 2.0**-126 * (1 + up)}

    def extremes(self, rows: int, draw: torch.Generator) -> Tensors:
        # Gates on both far sides of the sigmoid; products within every dtype.
        gates = torch.tensor([80.0, -80.0, 200.0, -200.0, 1e-4, 0.0, -1e-4])[:rows, None]
        gate = gates.expand(rows, self.request.width)
        up = normal(draw, rows, self.request.width, scale=30.0)
        return {"gate_up": torch.cat((gate, up), 1).to(self.dtype)}


def cases(dtype: str) -> Iterator[Case]:
    """Every case of these operators."""
    kinds: tuple[Any, ...] = (RmsNorm, AddRmsNorm, Swiglu)
    for kind in kinds:
        yield from operation_cases(partial(kind, dtype), dtype=dtype)
        for other in other_dtypes(dtype):
            yield from operation_cases(
                partial(kind, other), dtype=other, tier="serves", required=False, only=("odd_rows", "extremes")
            )
    yield from operation_cases(
        partial(HeadNorm, dtype, 64, 1e-6, "heads"), dtype=dtype, only=("odd_rows", "zero_rows", "strided_rows")
    )
    for variant, kind in (("odd_width", RmsNorm), ("add,odd_width", AddRmsNorm)):
        yield from operation_cases(
            partial(kind, dtype, 97, 1e-6, variant), dtype=dtype, tier="serves", required=False, only=("odd_rows",)
        )
    yield from operation_cases(
        partial(Swiglu, dtype, 96, 2.0, "limit"), dtype=dtype, tier="full", only=("odd_rows", "zero_rows", "extremes")
    )
