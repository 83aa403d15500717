"""The host's packed linear layer against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpu_support import normal, operator

from deepinfer_core.api import LinearRequest
from deepinfer_core.cpu import linear as module

EPSILON = 2.0**-24


def request(inp: int, out: int, bias: bool = False) -> LinearRequest:
    return LinearRequest(
        in_features=inp, out_features=out, dtype="float32", out_dtype="float32", weight_dtype="float32", bias=bias
    )


@pytest.fixture(params=["packed for oneDNN", "transposed"])
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Builds the layer with each way of keeping weights, as far as this host has it."""
    if request.param == "transposed":
        monkeypatch.setattr(module, "has_onednn", lambda: False)
    elif not module.has_onednn():
        pytest.skip("torch was built without oneDNN")
    return lambda *args, **kwargs: operator(_request(*args, **kwargs), "packed_linear")


_request = request


def check(result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Within the bound of a float32 sum of K products: K * eps times the sum of their magnitudes."""
    exact = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    assert result.dtype == torch.float32
    assert ((result.double() - exact).abs() <= (x.shape[1] + 2) * EPSILON * size + 1e-30).all()


@pytest.mark.parametrize(("inp", "out"), [(64, 24), (1, 1), (17, 33), (48, 1000), (300, 7), (512, 1024)])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 33])
def test_equals_the_formula(build: Any, inp: int, out: int, rows: int) -> None:
    op, weight, x = build(inp, out), normal(out, inp, seed=1), normal(rows, inp, seed=2)
    check(op.run(x, op.prepare([weight])), x, weight)


def test_parts_are_stacked_along_the_output(build: Any) -> None:
    op, parts, x = build(64, 24), [normal(rows, 64, seed=rows) for rows in (15, 4, 5)], normal(3, 64, seed=2)
    check(op.run(x, op.prepare(parts)), x, torch.cat(parts))


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_bias_is_added(build: Any, rows: int) -> None:
    op, weight, bias, x = build(32, 20, bias=True), normal(20, 32, seed=1), normal(20, seed=3), normal(rows, 32, seed=2)
    check(op.run(x, op.prepare([weight], bias)), x, weight, bias)


def test_no_rows(build: Any) -> None:
    op = build(32, 20)
    assert op.run(torch.zeros(0, 32), op.prepare([normal(20, 32, seed=1)])).shape == (0, 20)


@pytest.mark.parametrize("x", [normal(8, 32, seed=2)[::2], normal(32, 4, seed=2).T, normal(4, 64, seed=2)[:, 32:]])
def test_rows_may_be_strided(build: Any, x: torch.Tensor) -> None:
    op, weight = build(32, 20), normal(20, 32, seed=1)
    assert not x.is_contiguous()
    check(op.run(x, op.prepare([weight])), x, weight)


def test_a_narrower_weight_is_widened(build: Any) -> None:
    op, weight, x = build(32, 20), normal(20, 32, seed=1).bfloat16(), normal(2, 32, seed=2)
    check(op.run(x, op.prepare([weight])), x, weight)


def test_the_packed_weight_is_a_copy(build: Any) -> None:
    op, weight, x = build(32, 20), normal(20, 32, seed=1), normal(2, 32, seed=2)
    packed = op.prepare([weight])
    before = op.run(x, packed)
    weight.zero_()
    assert torch.equal(op.run(x, packed), before)


def test_results_share_no_memory(build: Any) -> None:
    op, x = build(32, 20), normal(2, 32, seed=2)
    packed = op.prepare([normal(20, 32, seed=1)])
    first = op.run(x, packed)
    kept = first.clone()
    op.run(x + 1, packed)
    assert torch.equal(first, kept)


def test_a_broken_row_breaks_no_other(build: Any) -> None:
    op, x = build(32, 20), normal(5, 32, seed=2)
    packed = op.prepare([normal(20, 32, seed=1)])
    clean = op.run(x, packed)
    x[2, 3] = float("nan")
    found = op.run(x, packed)
    assert found[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(found[others], clean[others])


def test_a_weight_of_another_shape_is_refused(build: Any) -> None:
    with pytest.raises(ValueError, match=r"\(24, 32\).*\(20, 32\)"):
        build(32, 20).prepare([normal(24, 32, seed=1)])
