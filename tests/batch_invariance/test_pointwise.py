"""Norms, activations, rotations, hyper-connections and roundings on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from invariance import MOST_ROWS, check_company, normal, operator, reference_operator

from deepinfer_core.api import (
    HyperConnectionRequest,
    HyperHeadRequest,
    OpRequest,
    QuantiseDequantiseRequest,
    RmsNormRequest,
    RopeRequest,
    SwigluRequest,
)

DEMANDS = frozenset({"batch_invariant"})
Case = tuple[OpRequest, Any]
"""A request, and ``run(op, rows) -> results`` on some of its rows."""


def norm(width: int, rows: int) -> Case:
    request = RmsNormRequest(hidden=width, eps=1e-6, dtype="float32", demands=DEMANDS)
    x, weight = normal(rows, width, seed=1), normal(width, seed=2)
    return request, lambda op, picked: op.run(x[picked], weight)


def norm_of_heads(width: int, rows: int) -> Case:
    request = RmsNormRequest(hidden=width, eps=1e-6, dtype="float32", demands=DEMANDS)
    x, weight = normal(rows, 3, width, seed=1), normal(width, seed=2)
    return request, lambda op, picked: op.run(x[picked], weight)


def norm_and_add(width: int, rows: int) -> Case:
    request = RmsNormRequest(hidden=width, eps=1e-6, dtype="float32", demands=DEMANDS)
    x, residual, weight = normal(rows, width, seed=1), normal(rows, width, seed=3), normal(width, seed=2)
    return request, lambda op, picked: op.add(x[picked], residual[picked], weight)


def swiglu(width: int, rows: int) -> Case:
    x = normal(rows, 2 * width, seed=1) * 4
    return SwigluRequest(width=width, dtype="float32", demands=DEMANDS), lambda op, picked: op.run(x[picked])


def swiglu_clamped(width: int, rows: int) -> Case:
    x = normal(rows, 2 * width, seed=1) * 4
    request = SwigluRequest(width=width, dtype="float32", limit=2.0, demands=DEMANDS)
    return request, lambda op, picked: op.run(x[picked])


def rope(width: int, rows: int, **changes: Any) -> Case:
    shape = {"head_dim": 2 * width, "rotary_dim": 2 * width, **changes}
    request = RopeRequest(theta=1e4, dtype="float32", max_positions=512, demands=DEMANDS, **shape)
    x = normal(rows, 3, 2 * width, seed=1)
    positions = torch.randint(0, 512, (rows,), generator=torch.Generator().manual_seed(4))

    def run(op: Any, picked: Any) -> Any:
        plan = op.plan(positions[picked])
        return op.run(x[picked], plan), op.run(x[picked], plan, inverse=True)

    return request, run


def rope_partly(width: int, rows: int) -> Case:
    return rope(width, rows, rotary_dim=2 * -(-width // 2), trailing=True, interleaved=True)


def rope_first(width: int, rows: int) -> Case:
    return rope(width, rows, rotary_dim=2 * -(-width // 2))


def hyper(width: int, rows: int) -> Case:
    request = HyperConnectionRequest(
        streams=4, hidden=width, iterations=20, eps=1e-6, norm_eps=1e-6, dtype="float32", demands=DEMANDS
    )
    fn, base, scale = normal(24, 4 * width, seed=1) / 8, normal(24, seed=2), normal(3, seed=3)
    streams, output = normal(rows, 4, width, seed=4), normal(rows, width, seed=5)

    def run(op: Any, picked: Any) -> Any:
        x, mixed = op.mix(streams[picked], op.prepare(fn, base, scale))
        return x, op.merge(streams[picked], output[picked], mixed)

    return request, run


def hyper_head(width: int, rows: int) -> Case:
    request = HyperHeadRequest(streams=4, hidden=width, eps=1e-6, norm_eps=1e-6, dtype="float32", demands=DEMANDS)
    fn, base, scale = normal(4, 4 * width, seed=1) / 8, normal(4, seed=2), normal(1, seed=3)
    streams = normal(rows, 4, width, seed=4)
    return request, lambda op, picked: op.run(streams[picked], op.prepare(fn, base, scale))


def rounding(width: int, rows: int) -> Case:
    request = QuantiseDequantiseRequest(
        format="fp8:e4m3", width=width, channels=width, group=width, dtype="float32", demands=DEMANDS
    )
    x = normal(rows, 2, width, seed=1)
    return request, lambda op, picked: op.run(x[picked])


def rounding_mixed(width: int, rows: int) -> Case:
    power = 1 << width.bit_length()
    request = QuantiseDequantiseRequest(
        format="fp4:e2m1", width=power, channels=power, group=power, dtype="float32", hadamard=True, demands=DEMANDS
    )
    x = normal(rows, 2, power, seed=1)
    return request, lambda op, picked: op.run(x[picked])


CASES = {
    norm: "rms_norm",
    norm_of_heads: "rms_norm",
    norm_and_add: "rms_norm",
    swiglu: "swiglu",
    swiglu_clamped: "swiglu",
    rope: "rope",
    rope_partly: "rope",
    rope_first: "rope",
    hyper: "hyper_connection",
    hyper_head: "hyper_head",
    rounding: "quantise_dequantise",
    rounding_mixed: "quantise_dequantise",
}
names = [case.__name__ for case in CASES]
cases = pytest.mark.parametrize("case", list(CASES), ids=names)


@cases
@settings(max_examples=6)
@given(width=st.integers(1, 150), rows=st.integers(0, MOST_ROWS), seed=st.integers(0, 99))
def test_rows_alone_and_together(case: Any, width: int, rows: int, seed: int) -> None:
    request, run = case(width, rows)
    op = operator(request, f"batch_invariance:{CASES[case]}")
    check_company(lambda picked: run(op, picked), rows, seed)


@cases
@pytest.mark.parametrize("threads", [1, 2])
def test_wide_rows_with_one_and_two_threads(case: Any, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        request, run = case(1001 if case not in (rounding_mixed, hyper, hyper_head) else 130, 200)
        op = operator(request, f"batch_invariance:{CASES[case]}", threads)
        check_company(lambda picked: run(op, picked), 200)
    finally:
        torch.set_num_threads(before)


@cases
@pytest.mark.parametrize("rows", [0, 1, 9])
@pytest.mark.parametrize("width", [1, 7, 64])
def test_equals_the_reference(case: Any, width: int, rows: int) -> None:
    request, run = case(width, rows)
    picked = list(range(rows))
    found = run(operator(request, f"batch_invariance:{CASES[case]}"), picked)
    wanted = run(reference_operator(request), picked)
    for mine, theirs in zip(_tuple(found), _tuple(wanted), strict=True):
        assert mine.shape == theirs.shape
        if case is rounding_mixed:  # a value next to a middle of the grid may go either way
            assert (mine - theirs).abs().gt(1e-5).float().mean() < 0.02 if rows else True
        else:
            assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def _tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)
