"""The host's batched and grouped products, small weights, and rotation of pairs."""

from __future__ import annotations

from typing import Any

import pytest
import reference_support
import torch
from cpu_support import normal, operator, verdicts

from deepinfer_core.api import BatchedLinearRequest, GroupedLinearRequest, LinearRequest, RopeRequest
from deepinfer_core.cpu import linear as linear_module

EPSILON = 2.0**-24
DTYPES: dict[str, str] = {"dtype": "float32", "out_dtype": "float32", "weight_dtype": "float32"}


def check(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Within the bound of a float32 sum of K products: K * eps times the sum of their magnitudes."""
    exact, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    assert found.dtype == torch.float32
    assert ((found.double() - exact).abs() <= (x.shape[-1] + 2) * EPSILON * size + 1e-30).all()


@pytest.fixture(params=["oneDNN", "without oneDNN"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without oneDNN":
        monkeypatch.setattr(linear_module, "has_onednn", lambda: False)
    elif not linear_module.has_onednn():
        pytest.skip("torch was built without oneDNN")


@pytest.mark.parametrize("rows", [0, 1, 2, 40])
def test_every_row_goes_through_every_group(rows: int) -> None:
    op = operator(BatchedLinearRequest(groups=3, in_features=20, out_features=7, **DTYPES))
    parts, x = [normal(14, 20, seed=1), normal(7, 20, seed=2)], normal(rows, 3, 20, seed=3)
    found = op.run(x, op.prepare(parts))
    assert found.shape == (rows, 3, 7)
    for group, weight in enumerate(torch.cat(parts).view(3, 7, 20)):
        check(found[:, group], x[:, group], weight)


@pytest.mark.parametrize("counts", [[0, 0, 0], [1, 0, 0], [1, 0, 1], [0, 0, 5], [2, 30, 1], [70, 0, 70]])
@pytest.mark.usefixtures("kernels")
def test_rows_go_through_their_own_group(counts: list[int]) -> None:
    op = operator(GroupedLinearRequest(groups=3, in_features=65, out_features=70, **DTYPES))
    parts = [[normal(30, 65, seed=g), normal(40, 65, seed=g + 9).bfloat16()] for g in range(3)]
    ends = [0, *torch.tensor(counts).cumsum(0).tolist()]
    x = normal(sum(counts), 65, seed=5)
    found = op.run(x, torch.tensor(ends), op.prepare(parts))
    assert found.shape == (len(x), 70)
    for group in range(3):
        rows = slice(ends[group], ends[group + 1])
        check(found[rows], x[rows], torch.cat([part.float() for part in parts[group]]))


def test_one_row_may_be_all_experts_input() -> None:
    """A single token's rows are views of it."""
    op = operator(GroupedLinearRequest(groups=4, in_features=32, out_features=8, **DTYPES))
    weights, x = [[normal(8, 32, seed=g)] for g in range(4)], normal(1, 32, seed=5)
    found = op.run(x.expand(2, -1), torch.tensor([0, 0, 1, 1, 2]), op.prepare(weights))
    check(found[:1], x, weights[1][0])
    check(found[1:], x, weights[3][0])


def test_weights_of_another_shape_are_refused() -> None:
    op = operator(GroupedLinearRequest(groups=2, in_features=32, out_features=8, **DTYPES))
    with pytest.raises(ValueError, match=r"1 groups.*2"):
        op.prepare([[normal(8, 32, seed=1)]])
    with pytest.raises(ValueError, match=r"\(9, 32\).*\(8, 32\)"):
        op.prepare([[normal(9, 32, seed=1)], [normal(8, 32, seed=1)]])


@pytest.mark.parametrize("kind", [BatchedLinearRequest, GroupedLinearRequest])
def test_packed_weights_are_declined(kind: Any) -> None:
    request = kind(groups=2, in_features=32, out_features=8, **(DTYPES | {"weight_dtype": "fp4:e2m1:1x32"}))
    assert all(not verdict and "fp4" in verdict.reason for verdict in verdicts(request).values())


def test_few_rows_of_a_small_weight_and_many_agree_with_the_formula() -> None:
    """Both layouts hold the same weight: rows just below and above the change of kernel."""
    size = 64
    op, weight = operator(LinearRequest(in_features=size, out_features=size, **DTYPES)), normal(size, size, seed=1)
    packed = op.prepare([weight])
    for rows in (1, linear_module.FEW // size**2, linear_module.FEW // size**2 + 1):
        x = normal(rows, size, seed=2)
        check(op.run(x, packed), x, weight)


def test_large_weights_are_kept_once() -> None:
    op = operator(LinearRequest(in_features=512, out_features=513, **DTYPES))
    assert op.prepare([normal(513, 512, seed=1)]).small is None


# ---- rotation of pairs


def rope(**changes: Any) -> RopeRequest:
    fields: dict[str, Any] = {
        "head_dim": 24, "rotary_dim": 8, "theta": 1e4, "dtype": "float32", "max_positions": 64, "interleaved": True,
        "trailing": True,
    }  # fmt: skip
    return RopeRequest(**(fields | changes))


@pytest.mark.parametrize("changes", [{}, {"trailing": False}, {"rotary_dim": 24}, {"rotary_dim": 2}])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_rotation_equals_the_reference(changes: dict[str, Any], inverse: bool, rows: int) -> None:
    request = rope(**changes)
    x, positions = normal(rows, 3, 24, seed=1), torch.arange(rows) * 9 + 3
    before = x.clone()
    found, wanted = (op.run(x, op.plan(positions), inverse=inverse)
                     for op in (operator(request), reference_support.operator(request)))  # fmt: skip
    assert torch.equal(x, before)
    assert found.shape == wanted.shape
    # A product and a sum of two products of numbers up to 4.
    assert torch.allclose(found, wanted, rtol=0, atol=16 * EPSILON)


def test_rotation_takes_heads_out_of_a_merged_projection() -> None:
    op, merged = operator(rope()), normal(4, 96, seed=1)
    view = merged[:, 24:72].unflatten(1, (2, 24))
    plan = op.plan(torch.arange(4))
    assert torch.equal(op.run(view, plan), op.run(view.contiguous(), plan))


def test_equal_angles_share_a_table() -> None:
    first, second, other = operator(rope()), operator(rope(head_dim=16)), operator(rope(theta=2e4))
    assert first._turns is second._turns
    assert first._turns is not other._turns
