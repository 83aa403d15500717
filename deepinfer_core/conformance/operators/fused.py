"""Regions: held to the composition of their parts, each of which may or may not round its result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from deepinfer_core.api import AttentionInputsRequest, GatedLinearRequest, StepLayout
from deepinfer_core.conformance.case import Case
from deepinfer_core.conformance.tolerance import FUNCTION, U32, gamma, rounding

from .caches import PAGED
from .draw import SampleFlatTokens, SampleTokens
from .gemm import magnitudes, stored_weight
from .listing import operation_cases, other_dtypes
from .operation import Operation, Put, Tensors, normal
from .rotary import LLAMA3, YARN, Rope
from .steps import BLOCK

SLOPE = 1.1
"""No less than the derivative of silu anywhere."""
UNWRITTEN = 7.0


class GatedLinear(Operation):
    """Errors of both products go through the activation."""

    def __init__(self, dtype: str, shape: tuple[int, int] = (128, 96), variant: str = "", **fields: Any) -> None:
        self.request = GatedLinearRequest(
            in_features=shape[0], width=shape[1], dtype=dtype, weight_dtype=dtype, **fields
        )
        self.variant = variant

    def sample(self, rows: int, draw: torch.Generator) -> Tensors:
        return {"x": normal(draw, rows, self.request.in_features, dtype=self.dtype, scale=2.0)}

    def constants(self, draw: torch.Generator) -> Mapping[str, Any]:
        r = self.request
        weight = stored_weight(draw, 2 * r.width, r.in_features, r.weight_dtype)
        bias = {"bias": normal(draw, 2 * r.width, dtype=self.dtype)} if r.bias else {}
        return {"weights": list(weight.chunk(2)), **bias}

    def prepare(self, op: Any, constants: Mapping[str, Any], put: Put) -> Mapping[str, Any]:
        bias = constants.get("bias")
        return {"packed": op.prepare(constants["weights"], None if bias is None else put(bias))}

    def call(self, op: Any, inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        return {"y": op.run(inputs["x"], weights["packed"])}

    def bounds(self, inputs: Tensors, constants: Mapping[str, Any], expected: Tensors) -> Tensors:
        r, x, y = self.request, inputs["x"], expected["y"]
        product = x @ torch.cat([part.to(torch.float64) for part in constants["weights"]]).T
        size = x.abs() @ magnitudes(constants["weights"]).T
        if "bias" in constants:
            bias = constants["bias"].to(torch.float64)
            product, size = product + bias, size + bias.abs()
        gate, up = product.chunk(2, 1)
        off_gate, off_up = (gamma(r.in_features) * size + rounding(product, self.dtype)).chunk(2, 1)
        if r.limit is not None:
            gate, up = gate.clamp(max=r.limit), up.clamp(-r.limit, r.limit)
        through = SLOPE * off_gate * (up.abs() + off_up) + torch.nn.functional.silu(gate).abs() * off_up
        return {"y": through + (FUNCTION + 2 * gate.abs()) * U32 * y.abs() + rounding(y, self.dtype)}


class AttentionInputs(Operation):
    """The queries, and the cache rows written: each stands before one that must stay as it was; ``beside`` counts
    what changed there."""

    def __init__(self, dtype: str, variant: str = "", **fields: Any) -> None:
        given: dict[str, Any] = {
            "cache_group": "full",
            "q_heads": 4,
            "kv_heads": 2,
            "head_dim": 64,
            "theta": 10000.0,
            "max_positions": 4096,
            "norm_eps": 1e-6,
            "dtype": dtype,
            "cache_dtype": dtype,
            "block_size": BLOCK,
            "demands": {f"kv_layout:{PAGED}"},
        }
        self.request = AttentionInputsRequest(**(given | fields))
        self.variant = variant

    @property
    def _heads(self) -> tuple[int, int, int]:
        return self.request.q_heads, self.request.kv_heads, self.request.kv_heads

    def sample(self, rows: int, draw: torch.Generator) -> Tensors:
        r = self.request
        positions = torch.randint(0, r.max_positions, (rows,), generator=draw)
        positions[:1], positions[1:2] = 0, r.max_positions - 1
        slots = 2 * torch.randperm(rows, generator=draw) + BLOCK
        return {
            "qkv": normal(draw, rows, sum(self._heads) * r.head_dim, dtype=self.dtype),
            "positions": positions,
            "slots": slots,
        }

    def constants(self, draw: torch.Generator) -> Mapping[str, Any]:
        if self.request.norm_eps is None:
            return {}
        return {name: normal(draw, self.request.head_dim, dtype=self.dtype) for name in ("q_norm", "k_norm")}

    def call(self, op: Any, inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        r, qkv, slots = self.request, inputs["qkv"], inputs["slots"]
        rows = qkv.shape[0]
        # A part of a batch keeps its slots, so the pool is as large for it as for the whole.
        shape = (2 * 512 // BLOCK + 2, BLOCK, r.kv_heads, r.head_dim)
        cache = {n: torch.full(shape, UNWRITTEN, dtype=qkv.dtype, device=qkv.device) for n in ("key", "value")}
        layout = StepLayout(
            block_size=BLOCK,
            cu_seqlens=torch.arange(rows + 1, dtype=torch.int32, device=qkv.device),
            seq_lens=(inputs["positions"] + 1).to(torch.int32),
            positions=inputs["positions"],
            block_table=torch.zeros((rows, r.max_positions // BLOCK), dtype=torch.int32, device=qkv.device),
            slot_mapping=slots,
            host_query_lens=np.ones(rows, dtype=np.int32),
            host_seq_lens=np.full(rows, r.max_positions, dtype=np.int32),
            max_query_len=min(rows, 1),
            max_seq_len=r.max_positions,
        )
        query = op.run(qkv, cache, op.plan(layout), **weights)
        key, value = (cache[name].flatten(0, 1) for name in ("key", "value"))
        beside = torch.stack((key[slots + 1], value[slots + 1]), 1) != UNWRITTEN
        return {"query": query, "key": key[slots], "value": value[slots], "beside": beside.flatten(1).sum(1)}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {**dict.fromkeys(("query", "key", "value"), self.dtype), "beside": torch.int64}

    def bounds(self, inputs: Tensors, constants: Mapping[str, Any], expected: Tensors) -> Tensors:
        r = self.request
        query, key, _ = inputs["qkv"].unflatten(1, (-1, r.head_dim)).split(self._heads, 1)  # type: ignore[no-untyped-call]
        zero = torch.zeros(())
        return {
            "query": self._bound(query, constants.get("q_norm"), inputs, expected["query"]),
            "key": self._bound(key, constants.get("k_norm"), inputs, expected["key"]),
            "value": zero,
            "beside": zero,
        }

    def _bound(self, x: torch.Tensor, weight: Any, inputs: Tensors, expected: torch.Tensor) -> torch.Tensor:
        """The norm's error, whose pairs a rotation mixes, and the rotation's own."""
        r = self.request
        before = torch.zeros_like(x)
        if weight is not None:
            assert r.norm_eps is not None
            x = x / x.square().mean(-1, keepdim=True).add(r.norm_eps).sqrt() * weight
            before = (gamma(r.head_dim) / 2 + FUNCTION * U32) * x.abs() + rounding(x, self.dtype)
        first, second = before.chunk(2, -1)
        mixed = 2 * torch.cat((first + second, first + second), -1)  # the factor on cos and sin of yarn is below 2
        turn = Rope(r.dtype, head_dim=r.head_dim, rotary_dim=r.head_dim, theta=r.theta, max_positions=r.max_positions)
        own = turn.bounds({"x": x, "positions": inputs["positions"]}, {}, {"y": expected})["y"]
        return mixed + own


def cases(dtype: str) -> Iterator[Case]:
    """Every case of these operators. A backend that offers none of them is refused, which is no failure."""
    optional: dict[str, Any] = {"required": False}
    yield from operation_cases(
        partial(AttentionInputs, dtype), dtype=dtype, tier="serves", without=("extremes",), **optional
    )
    for variant, fields in (
        ("no_norm", {"norm_eps": None}),
        ("many_heads", {"q_heads": 9, "kv_heads": 3, "head_dim": 128}),
        ("llama3", {"scaling": LLAMA3}),
        ("yarn", {"scaling": YARN}),
    ):
        inputs = partial(AttentionInputs, dtype, variant, **fields)
        yield from operation_cases(inputs, dtype=dtype, tier="serves", only=("odd_rows", "one_row"), **optional)
    yield from operation_cases(
        partial(GatedLinear, dtype), dtype=dtype, tier="serves", without=("extremes",), **optional
    )
    for variant, changes in (("bias", {"bias": True}), ("limit", {"limit": 0.5}), ("odd", {"shape": (200, 100)})):
        gated = partial(GatedLinear, dtype, variant=variant, **changes)
        yield from operation_cases(gated, dtype=dtype, tier="serves", only=("odd_rows", "one_row"), **optional)
    yield from operation_cases(SampleTokens, dtype="float32", tier="serves", without=("extremes",), **optional)
    yield from operation_cases(
        SampleFlatTokens, dtype="float32", tier="serves", only=("odd_rows", "one_row"), **optional
    )
    kinds: tuple[Any, ...] = (AttentionInputs, GatedLinear)
    for other in other_dtypes(dtype):
        for kind in kinds:
            yield from operation_cases(partial(kind, other), dtype=other, tier="serves", only=("odd_rows",), **optional)
