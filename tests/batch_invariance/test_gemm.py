"""Matrix products on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepinfer_batch_invariance import linear
from hypothesis import given, settings
from hypothesis import strategies as st
from invariance import MOST_ROWS, check_company, normal, operator, reference_operator

from deepinfer_core.api import BatchedLinearRequest, GroupedLinearRequest, LinearRequest

FLOAT32: dict[str, Any] = {"dtype": "float32", "out_dtype": "float32", "weight_dtype": "float32"}
DEMANDS = frozenset({"batch_invariant"})
sizes = st.integers(1, 150) | st.sampled_from([256, 576, 1023])


def linear_case(inner: int, out: int, rows: int, bias: bool, threads: int = 1) -> tuple[Any, Any, torch.Tensor]:
    """(request, packed weight and operator, input)."""
    request = LinearRequest(in_features=inner, out_features=out, bias=bias, demands=DEMANDS, **FLOAT32)
    op = operator(request, "batch_invariance:linear", threads)
    weight = op.prepare([normal(out, inner, seed=1)], normal(out, seed=2) if bias else None)
    return op, weight, normal(rows, inner, seed=3)


@settings(max_examples=12)
@given(inner=sizes, out=sizes, rows=st.integers(0, MOST_ROWS), bias=st.booleans(), seed=st.integers(0, 99))
def test_rows_alone_and_together(inner: int, out: int, rows: int, bias: bool, seed: int) -> None:
    op, weight, x = linear_case(inner, out, rows, bias)
    check_company(lambda picked: op.run(x[picked], weight), rows, seed)


@settings(max_examples=8)
@given(groups=st.integers(1, 5), inner=sizes, out=sizes, rows=st.integers(0, MOST_ROWS), seed=st.integers(0, 99))
def test_rows_alone_and_together_through_several_weights(
    groups: int, inner: int, out: int, rows: int, seed: int
) -> None:
    shape: dict[str, Any] = {"groups": groups, "in_features": inner, "out_features": out, "demands": DEMANDS, **FLOAT32}
    request = BatchedLinearRequest(**shape)
    op = operator(request, "batch_invariance:batched")
    parts = [normal(groups * out, inner, seed=1)]
    weight, x = op.prepare(parts), normal(rows, groups, inner, seed=2)
    check_company(lambda picked: op.run(x[picked], weight), rows, seed)
    exact = reference_operator(request)
    assert torch.allclose(op.run(x, weight), exact.run(x, exact.prepare(parts)), rtol=1e-4, atol=1e-4)


@settings(max_examples=8)
@given(groups=st.integers(1, 5), inner=sizes, out=sizes, rows=st.integers(0, MOST_ROWS), seed=st.integers(0, 99))
def test_rows_alone_and_together_each_with_its_expert(groups: int, inner: int, out: int, rows: int, seed: int) -> None:
    shape: dict[str, Any] = {"groups": groups, "in_features": inner, "out_features": out, "demands": DEMANDS, **FLOAT32}
    request = GroupedLinearRequest(**shape)
    op = operator(request, "batch_invariance:grouped")
    parts = [[normal(out, inner, seed=group)] for group in range(groups)]
    weight, x = op.prepare(parts), normal(rows, inner, seed=7)
    expert = torch.randint(0, groups, (rows,), generator=torch.Generator().manual_seed(seed))

    def run(picked: Any) -> torch.Tensor:
        order = torch.sort(expert[picked], stable=True).indices
        ends = torch.bincount(expert[picked], minlength=groups).cumsum(0)
        result = torch.empty(len(picked), out)
        result[order] = op.run(x[picked][order], torch.cat((ends.new_zeros(1), ends)), weight)
        return result

    check_company(run, rows, seed)
    exact = torch.stack([x[i].double() @ parts[expert[i]][0].double().T for i in range(rows)]) if rows else x[:, :0]
    assert rows == 0 or torch.allclose(run(list(range(rows))).double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("inner", "out"), [(576, 960), (1536, 576), (7168, 40)])
def test_large_layers_with_one_and_two_threads(inner: int, out: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        op, weight, x = linear_case(inner, out, MOST_ROWS, False, threads)
        check_company(lambda picked: op.run(x[picked], weight), MOST_ROWS)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [0, 1, 3, 8, 33])
@pytest.mark.parametrize(("inner", "out", "bias"), [(64, 24, False), (1, 1, True), (300, 7, True), (512, 1024, False)])
def test_equals_the_formula(inner: int, out: int, bias: bool, rows: int) -> None:
    op, weight, x = linear_case(inner, out, rows, bias)
    exact = x.double() @ normal(out, inner, seed=1).double().T + (normal(out, seed=2).double() if bias else 0)
    size = x.double().abs() @ normal(out, inner, seed=1).double().abs().T + 3
    assert ((op.run(x, weight).double() - exact).abs() <= (inner + 2) * 2.0**-24 * size).all()


def test_without_onednn_the_plain_product_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [way for way in linear.ways() if way.name == "plain"]
    monkeypatch.setattr(linear, "ways", lambda: plain)
    monkeypatch.setattr(linear, "_CHOSEN", {})
    op, weight, x = linear_case(96, 50, 100, False)
    check_company(lambda picked: op.run(x[picked], weight), 100)


def test_a_weight_of_another_shape_is_refused() -> None:
    request = LinearRequest(in_features=4, out_features=3, demands=DEMANDS, **FLOAT32)
    with pytest.raises(ValueError, match=r"\(5, 4\).*\(3, 4\)"):
        operator(request, "batch_invariance:linear").prepare([normal(5, 4)])


def test_a_broken_row_breaks_no_other() -> None:
    op, weight, x = linear_case(32, 20, 5, False)
    clean = op.run(x, weight)
    x[2, 3] = float("nan")
    found = op.run(x, weight)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
