"""Simulated quantisation: a grid, so right or wrong to the bit, save where a Hadamard product comes first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import attrs
import torch

from deepinfer_core.api import QdqFormat, QuantiseDequantiseRequest
from deepinfer_core.conformance.case import Case
from deepinfer_core.conformance.tolerance import gamma, rounding, unit_roundoff

from .listing import operation_cases, other_dtypes
from .operation import Operation, Oracle, Tensors, normal, widened


class QuantiseDequantise(Operation):
    """Without ``hadamard`` everything is exact. With it, a value near the middle of two codes may take either one."""

    def __init__(
        self,
        dtype: str,
        format: QdqFormat,
        width: int,
        channels: int,
        group: int,
        hadamard: bool = False,
        variant: str = "",
    ) -> None:
        self.request = QuantiseDequantiseRequest(
            format=format, width=width, channels=channels, group=group, dtype=dtype, hadamard=hadamard
        )
        self.variant = variant

    def sample(self, rows: int, draw: torch.Generator) -> Tensors:
        x = normal(draw, rows, self.request.width)
        x *= torch.exp2(torch.randint(-12, 6, (rows, 1), generator=draw).double()).float()
        x[2:3] = 0.0
        x[5:6, : self.request.group] = 1e-7  # a group below the smallest scale
        return {"x": x.to(self.dtype)}

    def call(self, op: Any, inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        return {"y": op.run(inputs["x"])}

    def expected(self, oracle: Oracle, inputs: Tensors, constants: Mapping[str, Any]) -> tuple[Tensors, Tensors]:
        r, x = self.request, inputs["x"].double()
        op = oracle(attrs.evolve(widened(r), hadamard=False))
        if not r.hadamard:
            y = op.run(x)
            return {"y": y}, {"y": torch.zeros_like(y)}
        matrix = sylvester(r.width)
        product = x @ matrix
        off = gamma(r.width) * (x.abs() @ matrix.abs()) + unit_roundoff(self.dtype) * product.abs()
        centre = product.to(self.dtype).double()
        y = op.run(centre)
        steps = [(op.run(centre + sign * 2 * off) - y).abs() for sign in (1, -1)]
        return {"y": y}, {"y": torch.maximum(*steps).nan_to_num() + rounding(y, self.dtype) + 2 * off.nan_to_num()}


def sylvester(width: int) -> torch.Tensor:
    """Orthonormal Walsh-Hadamard matrix, from its definition: entry (i, j) is the parity of ``i & j``."""
    both = torch.arange(width)[:, None] & torch.arange(width)
    parity = torch.stack([(both >> bit) & 1 for bit in range(width.bit_length())]).sum(0) % 2
    matrix: torch.Tensor = (1.0 - 2.0 * parity.double()) / width**0.5
    return matrix


def cases(dtype: str) -> Iterator[Case]:
    """Every case of this operator."""
    variants: tuple[tuple[str, QdqFormat, tuple[int, int, int], bool], ...] = (
        ("fp8", "fp8:e4m3", (96, 64, 32), False),
        ("fp4", "fp4:e2m1", (64, 64, 32), False),
        ("fp4,hadamard", "fp4:e2m1", (64, 64, 32), True),
        ("fp8,hadamard", "fp8:e4m3", (128, 128, 64), True),
    )
    own = ("odd_rows", "zero_rows", "broken_rows", "batch_invariant", "graph_capture", "results_kept")
    for variant, format, sizes, hadamard in variants:
        for name in (dtype, *other_dtypes(dtype)):
            yield from operation_cases(
                partial(QuantiseDequantise, name, format, *sizes, hadamard, variant),
                dtype=name,
                tier="full",
                required=name == dtype,
                only=own if name == dtype else ("odd_rows",),
            )
