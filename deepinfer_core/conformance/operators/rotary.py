"""Rotary embedding and embedding lookup: what depends on a row's position, or on its token id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from deepinfer_core.api import EmbeddingRequest, RopeRequest
from deepinfer_core.conformance.case import Case
from deepinfer_core.conformance.tolerance import FUNCTION, U32, rounding

from .listing import operation_cases, other_dtypes
from .operation import Operation, Put, Tensors, normal

LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1}
TURNS = 4.0
"""Units of float32 that an angle may be off by: two functions make a frequency, one product the angle."""


class Rope(Operation):
    """``run``: an angle is a float32 product, so its error grows with the angle; a turn keeps a pair's length."""

    heads = 3

    def __init__(self, dtype: str, variant: str = "", inverse: bool = False, **fields: Any) -> None:
        given = {"head_dim": 64, "rotary_dim": 64, "theta": 10000.0, "max_positions": 4096} | fields
        self.request = RopeRequest(dtype=dtype, **given)
        self.variant = variant
        self._inverse = inverse

    def sample(self, rows: int, draw: torch.Generator) -> Tensors:
        positions = torch.randint(0, self.request.max_positions, (rows,), generator=draw)
        positions[:1], positions[1:2] = 0, self.request.max_positions - 1
        x = normal(draw, rows, self.heads, self.request.head_dim, dtype=self.dtype)
        return {"x": x, "positions": positions}

    def call(self, op: Any, inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        plan = op.plan(inputs["positions"])
        return {"y": op.run(inputs["x"], plan, inverse=True) if self._inverse else op.run(inputs["x"], plan)}

    def bounds(self, inputs: Tensors, constants: Mapping[str, Any], expected: Tensors) -> Tensors:
        r, x = self.request, inputs["x"]
        start = r.head_dim - r.rotary_dim if r.trailing else 0
        rotary = x[..., start : start + r.rotary_dim]
        pairs = (rotary[..., 0::2], rotary[..., 1::2]) if r.interleaved else rotary.chunk(2, -1)
        length = torch.hypot(*pairs)
        # Without scaling, an upper limit of the angle: scaled frequencies are smaller.
        angle = inputs["positions"][:, None].double() * r.theta ** (-torch.arange(0, r.rotary_dim, 2) / r.rotary_dim)
        # Not more than a whole turn; the factor on cos and sin of yarn is below 2.
        error = 2 * length * ((TURNS * U32 * angle).clamp(max=2.0) + FUNCTION * U32)[:, None]
        both = torch.stack((error, error), -1).flatten(-2) if r.interleaved else torch.cat((error, error), -1)
        bound = torch.zeros_like(x)
        bound[..., start : start + r.rotary_dim] = both
        return {"y": bound + rounding(expected["y"], self.dtype)}


class Embedding(Operation):
    """A row of the table, cast once."""

    exact = True

    def __init__(self, dtype: str, vocab: int = 1000, hidden: int = 128, stored: str = "", variant: str = "") -> None:
        self.request = EmbeddingRequest(vocab_size=vocab, hidden=hidden, dtype=dtype, weight_dtype=stored or dtype)
        self.variant = variant

    def sample(self, rows: int, draw: torch.Generator) -> Tensors:
        ids = torch.randint(0, self.request.vocab_size, (rows,), generator=draw)
        ids[:1], ids[1:2] = self.request.vocab_size - 1, 0
        return {"token_ids": ids}

    def constants(self, draw: torch.Generator) -> Mapping[str, Any]:
        stored = getattr(torch, self.request.weight_dtype)
        return {"weight": normal(draw, self.request.vocab_size, self.request.hidden, dtype=stored)}

    def prepare(self, op: Any, constants: Mapping[str, Any], put: Put) -> Mapping[str, Any]:
        return {"packed": op.prepare(constants["weight"])}

    def call(self, op: Any, inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        return {"y": op.run(inputs["token_ids"], weights["packed"])}


def cases(dtype: str) -> Iterator[Case]:
    """Every case of these operators."""
    yield from operation_cases(partial(Rope, dtype), dtype=dtype)
    yield from operation_cases(
        partial(Rope, dtype, "inverse", inverse=True), dtype=dtype, tier="full", only=("odd_rows",)
    )
    for variant, fields in (("linear", LINEAR), ("llama3", LLAMA3), ("yarn", YARN)):
        yield from operation_cases(
            partial(Rope, dtype, variant, scaling=fields), dtype=dtype, tier="serves", only=("odd_rows",)
        )
    for variant, changes in (
        ("partial", {"rotary_dim": 32}),
        ("interleaved", {"interleaved": True}),
        ("interleaved,trailing", {"interleaved": True, "trailing": True, "rotary_dim": 16}),
    ):
        yield from operation_cases(
            partial(Rope, dtype, variant, **changes), dtype=dtype, tier="full", only=("odd_rows", "zero_rows")
        )
    yield from operation_cases(partial(Embedding, dtype), dtype=dtype)
    yield from operation_cases(
        partial(Embedding, dtype, stored="bfloat16", variant="bfloat16_table"),
        dtype=dtype,
        tier="serves",
        only=("odd_rows",),
    )
    for other in other_dtypes(dtype):
        for kind in (Rope, Embedding):
            yield from operation_cases(
                partial(kind, other), dtype=other, tier="serves", required=False, only=("odd_rows",)
            )
