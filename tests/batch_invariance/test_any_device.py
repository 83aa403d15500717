"""The operators that serve every device and dtype: the reference over tiles of rows, or row by row.

Tried on the host, which has no device but itself.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import test_attention as attention
import test_pointwise as pointwise
import torch
from deepinfer_batch_invariance.by_tiles import BatchedLinearByTiles, LinearByTiles
from deepinfer_batch_invariance.rounding import QuantiseDequantise
from deepinfer_batch_invariance.self_check import same_bits
from deepinfer_batch_invariance.tiles import steady_tiles
from hypothesis import given, settings
from hypothesis import strategies as st
from invariance import MOST_ROWS, check_company, context, normal, operator, reference_operator

from deepinfer_core.api import (
    BatchedLinearRequest,
    GroupedLinearRequest,
    LinearRequest,
    QuantiseDequantiseRequest,
    QuantisedWeight,
)
from deepinfer_core.reference.quantise import round_groups

DTYPES = ("float32", "bfloat16", "float64")
DEMANDS = frozenset({"batch_invariant"})


def shape(dtype: str, **fields: Any) -> dict[str, Any]:
    return {"dtype": dtype, "out_dtype": dtype, "weight_dtype": dtype, "demands": DEMANDS, **fields}


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=6)
@given(inner=st.integers(1, 70), out=st.integers(1, 70), rows=st.integers(0, MOST_ROWS), seed=st.integers(0, 99))
def test_gemm(dtype: str, inner: int, out: int, rows: int, seed: int) -> None:
    kind = getattr(torch, dtype)
    request = LinearRequest(in_features=inner, out_features=out, bias=True, **shape(dtype))
    op, exact = operator(request, "batch_invariance:linear_by_tiles"), reference_operator(request)
    parts, x = [normal(out, inner, seed=1, dtype=kind)], normal(rows, inner, seed=2, dtype=kind)
    bias = normal(out, seed=3, dtype=kind)
    weight = op.prepare(parts, bias)
    check_company(lambda picked: op.run(x[picked], weight), rows, seed)
    assert torch.allclose(op.run(x, weight), exact.run(x, exact.prepare(parts, bias)), rtol=1e-2, atol=1e-3)
    another = operator(request, "batch_invariance:linear_by_tiles")  # that packed nothing: a draft module's head
    assert torch.equal(another.run(x, weight), op.run(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=6)
@given(groups=st.integers(1, 4), inner=st.integers(1, 50), rows=st.integers(0, MOST_ROWS), seed=st.integers(0, 99))
def test_gemm_of_several_weights(dtype: str, groups: int, inner: int, rows: int, seed: int) -> None:
    kind = getattr(torch, dtype)
    request = BatchedLinearRequest(groups=groups, in_features=inner, out_features=20, **shape(dtype))
    op = operator(request, "batch_invariance:batched_by_tiles")
    weight = op.prepare([normal(groups * 20, inner, seed=1, dtype=kind)])
    x = normal(rows, groups, inner, seed=2, dtype=kind)
    check_company(lambda picked: op.run(x[picked], weight), rows, seed)


@settings(max_examples=10)
@given(groups=st.integers(1, 6), rows=st.integers(0, MOST_ROWS), seed=st.integers(0, 99))
def test_gemm_of_experts_whose_weights_are_packed(groups: int, rows: int, seed: int) -> None:
    """FP4 weights, which the reference decodes."""
    generator = torch.Generator().manual_seed(seed)
    request = GroupedLinearRequest(
        groups=groups, in_features=32, out_features=16, **shape("float32", weight_dtype="fp4:e2m1:1x32")
    )
    parts = [
        [
            QuantisedWeight(
                format="fp4:e2m1",
                data=torch.randint(-128, 128, (16, 16), generator=generator, dtype=torch.int8),
                scale=torch.full((16, 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu),
                block=(1, 32),
            )
        ]
        for _ in range(groups)
    ]
    op, exact = operator(request, "batch_invariance:grouped_by_tiles"), reference_operator(request)
    weight, x = op.prepare(parts), normal(rows, 32, seed=2)
    expert = torch.randint(0, groups, (rows,), generator=generator)

    def run(op: Any, weight: Any, picked: Any) -> torch.Tensor:
        order = torch.sort(expert[picked], stable=True).indices
        ends = torch.bincount(expert[picked], minlength=groups).cumsum(0)
        result = torch.empty(len(picked), 16)
        result[order] = op.run(x[picked][order], torch.cat((ends.new_zeros(1), ends)), weight)
        return result

    check_company(lambda picked: run(op, weight, picked), rows, seed)
    every = list(range(rows))
    assert torch.allclose(run(op, weight, every), run(exact, exact.prepare(parts), every), rtol=1e-4, atol=1e-4)


class MovesByTheLastBit:
    """The reference operator on a library whose sums are one float32 bit larger from 16 rows on."""

    def __init__(self, request: Any) -> None:
        self._request, self._exact = request, reference_operator(request)
        self._sums = reference_operator(attrs.evolve(request, **_wide(request)))
        self.prepare = getattr(self._exact, "prepare", None)

    def run(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        sums = self._sums.run(x.float() if isinstance(self._request, QuantiseDequantiseRequest) else x, *rest)
        if len(x) >= 16:
            sums = torch.nextafter(sums, sums.new_tensor(torch.inf))
        if not isinstance(self._request, QuantiseDequantiseRequest):
            return sums.to(getattr(torch, self._request.out_dtype))
        sums = sums.to(getattr(torch, self._request.dtype)).float()
        rounded = round_groups(sums[:, : self._request.channels], self._request.format, self._request.group)
        return torch.cat((rounded, sums[:, self._request.channels :]), 1).to(getattr(torch, self._request.dtype))


def _wide(request: Any) -> dict[str, Any]:
    if isinstance(request, QuantiseDequantiseRequest):
        return {"channels": 0, "dtype": "float32"}
    return {"out_dtype": "float32"}


LAST_BITS = {
    "linear": LinearRequest(in_features=64, out_features=64, **shape("bfloat16")),
    "batched": BatchedLinearRequest(groups=2, in_features=64, out_features=32, **shape("bfloat16")),
    "rounding": QuantiseDequantiseRequest(
        format="fp8:e4m3", width=64, channels=32, group=32, dtype="bfloat16", hadamard=True, demands=DEMANDS
    ),
}


@pytest.mark.parametrize("name", LAST_BITS)
def test_sums_are_tried_before_they_are_rounded(name: str) -> None:
    """In bfloat16 most results hide that a sum moved: a trial of rounded ones kept counts that are not steady."""
    request = LAST_BITS[name]
    build = {"linear": LinearByTiles, "batched": BatchedLinearByTiles, "rounding": QuantiseDequantise}[name]
    op = build(request, attrs.evolve(context(), reference=MovesByTheLastBit))
    shaped = (3000, 2, 64) if name == "batched" else (3000, 64)
    x = normal(*shaped, seed=5, dtype=torch.bfloat16)
    weight = () if name == "rounding" else (op.prepare([normal(64, 64, seed=6, dtype=torch.bfloat16)]),)
    moved = MovesByTheLastBit(request)
    assert not same_bits(moved.run(x, *weight), torch.cat([moved.run(part, *weight) for part in torch.split(x, 8)]))
    check_company(lambda picked: op.run(x[picked], *weight), len(x))
    assert same_bits(op.run(x, *weight), torch.cat([op.run(part, *weight) for part in torch.split(x, 8)]))


def test_large_tiles_that_go_another_way_are_left_out() -> None:
    def moves(x: torch.Tensor) -> torch.Tensor:
        return torch.nextafter(x, x.new_tensor(torch.inf)) if len(x) in (2, 64, 128) else x

    row = normal(100)
    assert steady_tiles(moves, row, "this", 1, (4, 8, 16, 32, 64, 128)).counts == (4, 8, 16, 32)
    assert steady_tiles(moves, row, "this", 1, (2, 8, 64, 128)).counts == (2, 64, 128)
    assert steady_tiles(moves, row, "this", 1, (64, 128)).counts == (1,)


BY_TILES = [case for case, name in pointwise.CASES.items() if name != "quantise_dequantise"]


@pytest.mark.parametrize("case", BY_TILES, ids=[case.__name__ for case in BY_TILES])
@settings(max_examples=5)
@given(width=st.integers(1, 70), rows=st.integers(0, 70), seed=st.integers(0, 99))
def test_pointwise(case: Any, width: int, rows: int, seed: int) -> None:
    request, run = case(width, rows)
    op = operator(request, f"batch_invariance:{pointwise.CASES[case]}_by_tiles")
    check_company(lambda picked: run(op, picked), rows, seed)
    every = list(range(rows))
    for mine, theirs in zip(_tuple(run(op, every)), _tuple(run(reference_operator(request), every)), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in attention.CASES if not name.startswith("transposed")])
@settings(max_examples=3)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_attention(name: str, lengths: list[int], seed: int) -> None:
    (request, over), provider = attention.CASES[name]
    attention.check(operator(request, f"batch_invariance:{provider}_rows_alone"), over, lengths, seed)


def _tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)
