"""Matrix products against weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from deepinfer_core.api import LinearRequest
from deepinfer_core.conformance.case import Case
from deepinfer_core.conformance.tolerance import gamma, rounding

from .listing import operation_cases, other_dtypes
from .operation import Operation, Put, Tensors, normal


class Linear(Operation):
    """``gamma(in_features)`` of the products' magnitudes, and one rounding."""

    def __init__(
        self,
        dtype: str,
        shape: tuple[int, int] = (128, 192),
        *,
        bias: bool = False,
        parts: int = 1,
        out_dtype: str = "",
        variant: str = "",
    ) -> None:
        self.request = LinearRequest(
            in_features=shape[0],
            out_features=shape[1],
            dtype=dtype,
            out_dtype=out_dtype or dtype,
            weight_dtype=dtype,
            bias=bias,
        )
        self.variant = variant
        self._parts = parts

    def sample(self, rows: int, draw: torch.Generator) -> Tensors:
        return {"x": normal(draw, rows, self.request.in_features, dtype=self.dtype)}

    def extremes(self, rows: int, draw: torch.Generator) -> Tensors:
        top = 8.0 if self.dtype == torch.float16 else 1e15
        scales = torch.tensor([top, 1e-4, 1.0, 0.0, top, 1e-3, 1.0])[:rows, None]
        return {"x": (normal(draw, rows, self.request.in_features) * scales).to(self.dtype)}

    def constants(self, draw: torch.Generator) -> Mapping[str, Any]:
        r = self.request
        weight = normal(draw, r.out_features, r.in_features, dtype=self.dtype, scale=r.in_features**-0.5)
        found: dict[str, Any] = {"weights": list(weight.chunk(self._parts))}
        if r.bias:
            found["bias"] = normal(draw, r.out_features, dtype=self.dtype)
        return found

    def prepare(self, op: Any, constants: Mapping[str, Any], put: Put) -> Mapping[str, Any]:
        bias = constants.get("bias")
        return {"packed": op.prepare(constants["weights"], None if bias is None else put(bias))}

    def call(self, op: Any, inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        return {"y": op.run(inputs["x"], weights["packed"])}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {"y": getattr(torch, self.request.out_dtype)}

    def bounds(self, inputs: Tensors, constants: Mapping[str, Any], expected: Tensors) -> Tensors:
        weight = torch.cat(list(constants["weights"])).to(torch.float64).abs()
        size = inputs["x"].abs() @ weight.T
        if "bias" in constants:
            size = size + constants["bias"].to(torch.float64).abs()
        return {"y": gamma(self.request.in_features) * size + rounding(expected["y"], self.dtypes()["y"])}


def cases(dtype: str) -> Iterator[Case]:
    """Every case of these operators."""
    yield from operation_cases(partial(Linear, dtype), dtype=dtype)
    yield from operation_cases(partial(Linear, dtype, parts=3, variant="merged"), dtype=dtype, only=("odd_rows",))
    yield from operation_cases(
        partial(Linear, dtype, bias=True, variant="bias"), dtype=dtype, tier="serves", only=("odd_rows", "one_row")
    )
    for other in other_dtypes(dtype):
        yield from operation_cases(
            partial(Linear, other), dtype=other, tier="serves", required=False, only=("odd_rows", "extremes")
        )
