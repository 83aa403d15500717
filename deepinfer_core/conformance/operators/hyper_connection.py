"""Hyper-connections: streams into a sub-layer, its output back into the streams, and their last sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from deepinfer_core.api import HyperConnectionRequest, HyperHeadRequest
from deepinfer_core.conformance.case import Case
from deepinfer_core.conformance.tolerance import FUNCTION, U32, gamma, rounding

from .listing import operation_cases, other_dtypes
from .operation import Operation, Put, Tensors, normal


class HyperConnection(Operation):
    """``mix``, then ``merge`` with an output of its own.

    Bounds: a coefficient ``z`` is a sum of ``M * hidden`` products over a root mean square. A sigmoid moves by a
    quarter of what its argument moves. Sinkhorn's iteration never widens relative differences (Hilbert's metric), so
    the mixing matrix is off by twice what its logits are, and by the roundings of its divisions.
    """

    overwritten = frozenset({"streams"})

    def __init__(self, dtype: str, streams: int = 4, hidden: int = 64, iterations: int = 20, variant: str = "") -> None:
        self.request = HyperConnectionRequest(
            streams=streams, hidden=hidden, iterations=iterations, eps=1e-6, norm_eps=1e-6, dtype=dtype
        )
        self.variant = variant

    def sample(self, rows: int, draw: torch.Generator) -> Tensors:
        r = self.request
        return {
            "streams": normal(draw, rows, r.streams, r.hidden, dtype=self.dtype, scale=2.0),
            "output": normal(draw, rows, r.hidden, dtype=self.dtype),
        }

    def constants(self, draw: torch.Generator) -> Mapping[str, Any]:
        r = self.request
        rows = (2 + r.streams) * r.streams
        return {
            "fn": normal(draw, rows, r.streams * r.hidden, scale=(r.streams * r.hidden) ** -0.5),
            "base": normal(draw, rows),
            "scale": 1 + normal(draw, 3, scale=0.3),
        }

    def prepare(self, op: Any, constants: Mapping[str, Any], put: Put) -> Mapping[str, Any]:
        return {"packed": op.prepare(constants["fn"], constants["base"], constants["scale"])}

    def call(self, op: Any, inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        mixed, state = op.mix(inputs["streams"], weights["packed"])
        return {"mixed": mixed, "merged": op.merge(inputs["streams"], inputs["output"], state)}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {"mixed": self.dtype, "merged": self.dtype}

    def bounds(self, inputs: Tensors, constants: Mapping[str, Any], expected: Tensors) -> Tensors:
        r, m = self.request, self.request.streams
        streams = inputs["streams"].nan_to_num()
        argument, off = arguments(streams, constants, r.norm_eps, [m, m, m * m])
        pre, post = gates(argument[:, : 2 * m], off[:, : 2 * m]).chunk(2, 1)
        logits = off[:, 2 * m :].amax(1) + 2 * U32 * argument[:, 2 * m :].abs().amax(1)
        comb = torch.expm1(4 * logits) + (2 * r.iterations * (m + 2) + FUNCTION) * U32
        size, output = streams.abs(), inputs["output"].abs().nan_to_num()
        mixed = (pre[:, :, None] * size).sum(1) + gamma(m) * size.sum(1)
        kept = size.amax(1, keepdim=True)
        merged = 2 * post[:, :, None] * output[:, None] + comb[:, None, None] * kept
        merged = merged + gamma(m + 1) * (2 * output[:, None] + kept)
        return {
            "mixed": mixed + rounding(expected["mixed"], self.dtype),
            "merged": merged + rounding(expected["merged"], self.dtype),
        }


class HyperHead(Operation):
    """The streams' last sum."""

    def __init__(self, dtype: str, streams: int = 4, hidden: int = 64, variant: str = "") -> None:
        self.request = HyperHeadRequest(streams=streams, hidden=hidden, eps=1e-6, norm_eps=1e-6, dtype=dtype)
        self.variant = variant

    def sample(self, rows: int, draw: torch.Generator) -> Tensors:
        r = self.request
        return {"streams": normal(draw, rows, r.streams, r.hidden, dtype=self.dtype, scale=2.0)}

    def constants(self, draw: torch.Generator) -> Mapping[str, Any]:
        r = self.request
        return {
            "fn": normal(draw, r.streams, r.streams * r.hidden, scale=(r.streams * r.hidden) ** -0.5),
            "base": normal(draw, r.streams),
            "scale": 1 + normal(draw, 1, scale=0.3),
        }

    def prepare(self, op: Any, constants: Mapping[str, Any], put: Put) -> Mapping[str, Any]:
        return {"packed": op.prepare(constants["fn"], constants["base"], constants["scale"])}

    def call(self, op: Any, inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        return {"y": op.run(inputs["streams"], weights["packed"])}

    def bounds(self, inputs: Tensors, constants: Mapping[str, Any], expected: Tensors) -> Tensors:
        r, streams = self.request, inputs["streams"].nan_to_num()
        pre = gates(*arguments(streams, constants, r.norm_eps, [r.streams]))
        size = streams.abs()
        bound = (pre[:, :, None] * size).sum(1) + gamma(r.streams) * size.sum(1)
        return {"y": bound + rounding(expected["y"], self.dtype)}


def arguments(
    streams: torch.Tensor, constants: Mapping[str, Any], norm_eps: float, parts: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments ``z * scale + base`` ``[T, rows]`` of the gates, and how far each may be off."""
    flat, fn = streams.flatten(1), constants["fn"].double()
    length = flat.shape[1]
    size = flat.square().mean(1, keepdim=True).add(norm_eps).sqrt()
    z = flat @ fn.T / size
    scale = constants["scale"].double().repeat_interleave(torch.tensor(parts))
    argument = z * scale + constants["base"].double()
    off = gamma(length) * (flat.abs() @ fn.abs().T) / size + (gamma(length) / 2 + FUNCTION * U32) * z.abs()
    return argument, scale.abs() * off


def gates(argument: torch.Tensor, off: torch.Tensor) -> torch.Tensor:
    """How far a sigmoid of an argument may be off."""
    return off / 4 + U32 * (FUNCTION + argument.abs())


def cases(dtype: str) -> Iterator[Case]:
    """Every case of these operators."""
    kinds: tuple[Any, ...] = (HyperConnection, HyperHead)
    for kind in kinds:
        yield from operation_cases(partial(kind, dtype), dtype=dtype, tier="full", without=("extremes", "strided_rows"))
        for other in other_dtypes(dtype):
            yield from operation_cases(
                partial(kind, other), dtype=other, tier="full", required=False, only=("odd_rows",)
            )
