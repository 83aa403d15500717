"""Norms, rotary embedding, gated activation, embedding lookup."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from deepinfer_core.api import RmsNormRequest
from deepinfer_core.conformance.case import Case
from deepinfer_core.conformance.tolerance import FUNCTION, U32, gamma, rounding

from .listing import operation_cases, other_dtypes
from .operation import Operation, Tensors, normal


class RmsNorm(Operation):
    """``run``: relative error of the mean of ``hidden`` squares, halved by the root, and of the functions."""

    def __init__(self, dtype: str, hidden: int, eps: float = 1e-5) -> None:
        self.request = RmsNormRequest(hidden=hidden, eps=eps, dtype=dtype)

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

    def extremes(self, rows: int, draw: torch.Generator) -> Tensors:
        # Squares must stay within float32, the dtype of the statistics; and within the dtype itself.
        x = normal(draw, rows, self.request.hidden)
        top = 1e4 if self.dtype == torch.float16 else 1e17
        x *= torch.tensor([top, 1.0, 1e-4, 0.0, top, 1e-3, 1.0])[:rows, None]
        return {"x": x.to(self.dtype)}


class AddRmsNorm(RmsNorm):
    """``add``: the sum is one rounding; the norm is held to that of the sum that was returned."""

    variant = "add"
    overwritten = frozenset({"residual"})

    def sample(self, rows: int, draw: torch.Generator) -> Tensors:
        return {
            "x": super().sample(rows, draw)["x"],
            "residual": normal(draw, rows, self.request.hidden).to(self.dtype),
        }

    def extremes(self, rows: int, draw: torch.Generator) -> Tensors:
        x = RmsNorm.extremes(self, rows, draw)["x"]
        return {"x": x, "residual": x.flip(-1).clone()}

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


def cases(dtype: str) -> Iterator[Case]:
    """Every case of these operators."""
    for kind in (RmsNorm, AddRmsNorm):
        yield from operation_cases(partial(kind, dtype, 128), dtype=dtype)
        for other in other_dtypes(dtype):
            yield from operation_cases(
                partial(kind, other, 128), dtype=other, tier="serves", required=False, only=("odd_rows", "extremes")
            )
