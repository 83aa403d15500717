"""Matrix products against weights, plain and packed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import torch

from deepinfer_core.api import (
    BatchedLinearRequest,
    GroupedLinearRequest,
    LinearRequest,
    QuantisedWeight,
    WeightFormat,
    quantised_name,
)
from deepinfer_core.conformance.case import Case
from deepinfer_core.conformance.tolerance import gamma, rounding

from .listing import operation_cases, other_dtypes
from .operation import Operation, Put, Tensors, normal

FORMATS: tuple[tuple[WeightFormat, tuple[int, int]], ...] = (("fp8:e4m3", (128, 128)), ("fp4:e2m1", (1, 32)))


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
        stored: str = "",
        activations: str = "",
        variant: str = "",
    ) -> None:
        self.request = LinearRequest(
            in_features=shape[0],
            out_features=shape[1],
            dtype=dtype,
            out_dtype=out_dtype or dtype,
            weight_dtype=stored or dtype,
            bias=bias,
            activations=activations,
        )
        self.variant = variant
        self._parts = parts

    def sample(self, rows: int, draw: torch.Generator) -> Tensors:
        return {"x": normal(draw, rows, self.request.in_features, dtype=self.dtype)}

    def extremes(self, rows: int, draw: torch.Generator) -> Tensors | None:
        top = 8.0 if self.dtype == torch.float16 else 1e15
        scales = torch.tensor([top, 1e-4, 1.0, 0.0, top, 1e-3, 1.0])[:rows, None]
        return {"x": (normal(draw, rows, self.request.in_features) * scales).to(self.dtype)}

    def constants(self, draw: torch.Generator) -> Mapping[str, Any]:
        r = self.request
        weight = stored_weight(draw, r.out_features, r.in_features, r.weight_dtype)
        found: dict[str, Any] = {"weights": list(weight.chunk(self._parts)) if self._parts > 1 else [weight]}
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
        size = inputs["x"].abs() @ magnitudes(constants["weights"]).T
        coarse = gamma(self.request.in_features)
        if self.request.activations:
            size = size * (1 + 2**-4)  # by as much may rounding to e4m3 enlarge an input
            coarse += 2**-10
        if "bias" in constants:
            size = size + constants["bias"].to(torch.float64).abs()
        return {"y": coarse * size + rounding(expected["y"], self.dtypes()["y"])}


class _Groups(Linear):
    """Several weights behind one call."""

    kind: ClassVar[type[BatchedLinearRequest] | type[GroupedLinearRequest]]
    groups: ClassVar[int]

    def __init__(self, dtype: str, shape: tuple[int, int] = (64, 48), stored: str = "", variant: str = "") -> None:
        self.request = self.kind(
            groups=self.groups,
            in_features=shape[0],
            out_features=shape[1],
            dtype=dtype,
            out_dtype=dtype,
            weight_dtype=stored or dtype,
        )
        self.variant = variant

    def extremes(self, rows: int, draw: torch.Generator) -> Tensors | None:
        return None


class BatchedLinear(_Groups):
    """Every row through all groups."""

    kind = BatchedLinearRequest
    groups = 3

    def sample(self, rows: int, draw: torch.Generator) -> Tensors:
        return {"x": normal(draw, rows, self.groups, self.request.in_features, dtype=self.dtype)}

    def constants(self, draw: torch.Generator) -> Mapping[str, Any]:
        r = self.request
        return {"weights": [stored_weight(draw, r.groups * r.out_features, r.in_features, r.weight_dtype)]}

    def prepare(self, op: Any, constants: Mapping[str, Any], put: Put) -> Mapping[str, Any]:
        return {"packed": op.prepare(constants["weights"])}

    def bounds(self, inputs: Tensors, constants: Mapping[str, Any], expected: Tensors) -> Tensors:
        r = self.request
        weight = magnitudes(constants["weights"]).view(r.groups, r.out_features, r.in_features)
        size = torch.einsum("tgi,goi->tgo", inputs["x"].abs(), weight)
        return {"y": gamma(r.in_features) * size + rounding(expected["y"], self.dtypes()["y"])}


class GroupedLinear(_Groups):
    """Rows sorted by group; some groups have none."""

    kind = GroupedLinearRequest
    groups = 5
    sorted_rows = True

    def constants(self, draw: torch.Generator) -> Mapping[str, Any]:
        r = self.request
        halves = (r.out_features // 2, r.out_features - r.out_features // 2)
        return {
            "weights": [
                [stored_weight(draw, rows, r.in_features, r.weight_dtype) for rows in halves] for _ in range(r.groups)
            ]
        }

    def prepare(self, op: Any, constants: Mapping[str, Any], put: Put) -> Mapping[str, Any]:
        return {"packed": op.prepare(constants["weights"])}

    def sample(self, rows: int, draw: torch.Generator) -> Tensors:
        return {**Linear.sample(self, rows, draw), "group": groups_of(rows)}

    def call(self, op: Any, inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        group = inputs["group"]
        bounds = torch.arange(self.groups + 1, device=group.device)
        return {"y": op.run(inputs["x"], (group < bounds[:, None]).sum(1), weights["packed"])}

    def bounds(self, inputs: Tensors, constants: Mapping[str, Any], expected: Tensors) -> Tensors:
        weight = torch.stack([magnitudes(parts) for parts in constants["weights"]])
        size = torch.einsum("ni,noi->no", inputs["x"].abs(), weight[inputs["group"]])
        return {"y": gamma(self.request.in_features) * size + rounding(expected["y"], self.dtypes()["y"])}


def groups_of(rows: int) -> torch.Tensor:
    """``[rows]`` int64, ascending: of five groups the first and third have no rows, the fourth has one."""
    group = torch.full((rows,), 4)
    group[: 2 * rows // 3] = 1
    group[2 * rows // 3 : 2 * rows // 3 + 1] = 3
    return group


def stored_weight(draw: torch.Generator, rows: int, columns: int, stored: str) -> Any:
    """A weight as a checkpoint holds it: in a torch dtype, or packed with scales that differ from block to block."""
    if not stored.startswith(("fp8:", "fp4:")):
        return normal(draw, rows, columns, dtype=getattr(torch, stored), scale=columns**-0.5)
    fp8 = stored.startswith("fp8:")
    height, width = (int(size) for size in stored.rpartition(":")[2].split("x"))
    scale = torch.randint(118, 127, (-(-rows // height), -(-columns // width)), generator=draw).to(torch.uint8)
    if fp8:
        data = normal(draw, rows, columns, scale=4.0).to(torch.float8_e4m3fn)
    else:
        data = torch.randint(-128, 128, (rows, columns // 2), generator=draw).to(torch.int8)
    return QuantisedWeight(
        format="fp8:e4m3" if fp8 else "fp4:e2m1",
        data=data,
        scale=scale.view(torch.float8_e8m0fnu),
        block=(height, width),
    )


def magnitudes(parts: list[Any]) -> torch.Tensor:
    """``[out, in]`` float64 absolute values of stacked parts."""
    return torch.cat([_values(part) for part in parts]).abs()


def _values(part: torch.Tensor | QuantisedWeight) -> torch.Tensor:
    """A part's numbers, from the format's definition (api/gemm.py), apart from any operator's decoding."""
    if isinstance(part, torch.Tensor):
        return part.to(torch.float64)
    if part.format == "fp8:e4m3":
        values = part.data.to(torch.float64)
    else:
        codes = part.data.view(torch.uint8).to(torch.int64)
        halves = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        values = table[halves & 7] * (1 - 2 * (halves >> 3))
    rows, columns = part.block
    scale = torch.exp2(part.scale.view(torch.uint8).to(torch.float64) - 127)
    wide = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return values * wide[: values.shape[0], : values.shape[1]]


def cases(dtype: str) -> Iterator[Case]:
    """Every case of these operators."""
    yield from operation_cases(partial(Linear, dtype), dtype=dtype)
    yield from operation_cases(partial(Linear, dtype, parts=3, variant="merged"), dtype=dtype, only=("odd_rows",))
    yield from operation_cases(
        partial(Linear, dtype, (128, 1000), out_dtype="float32", variant="logits"),
        dtype=dtype,
        only=("odd_rows", "one_row", "zero_rows", "batch_invariant"),
    )
    yield from operation_cases(
        partial(Linear, dtype, bias=True, variant="bias"), dtype=dtype, tier="serves", only=("odd_rows", "one_row")
    )
    yield from operation_cases(
        partial(Linear, dtype, stored="bfloat16", variant="bfloat16_weight"),
        dtype=dtype,
        tier="serves",
        only=("odd_rows",),
    )
    yield from operation_cases(
        partial(Linear, dtype, (2048, 64), variant="long"), dtype=dtype, tier="serves", only=("odd_rows",)
    )
    for kind in (BatchedLinear, GroupedLinear):
        yield from operation_cases(partial(kind, dtype), dtype=dtype, tier="full", without=("extremes",))
    for format, block in FORMATS:
        stored = quantised_name(format, block)
        for packed, shape in ((Linear, (256, 192)), (BatchedLinear, (128, 128)), (GroupedLinear, (128, 256))):
            make: Any = partial(packed, dtype, shape, stored=stored, variant=stored)
            yield from operation_cases(make, dtype=dtype, tier="full", only=("odd_rows", "one_row", "zero_rows"))
    stored = quantised_name("fp8:e4m3", (128, 128))
    rounded: Any = partial(
        Linear, dtype, (256, 192), stored=stored, activations="fp8:e4m3:128", variant=f"{stored},rounded"
    )
    yield from operation_cases(
        rounded, dtype=dtype, tier="full", required=False, only=("odd_rows", "one_row", "zero_rows", "extremes")
    )
    for other in other_dtypes(dtype):
        yield from operation_cases(
            partial(Linear, other), dtype=other, tier="serves", required=False, only=("odd_rows", "extremes")
        )
        for kind in (BatchedLinear, GroupedLinear):
            yield from operation_cases(
                partial(kind, other), dtype=other, tier="full", required=False, only=("odd_rows",)
            )
