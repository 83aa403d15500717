"""The host's norms, activation and rotary embedding against float64 formulas and the reference."""

from __future__ import annotations

from typing import Any

import pytest
import reference_support
import torch
from cpu_support import normal, operator

from deepinfer_core.api import RmsNormRequest, RopeRequest, SwigluRequest

EPS = 1e-5
ULPS = 8 * 2.0**-24


def close(found: torch.Tensor, exact: torch.Tensor, size: torch.Tensor | float = 1.0) -> bool:
    """Within a few float32 roundings of values of this size."""
    return bool(((found.double() - exact).abs() <= ULPS * (exact.abs() + size)).all())


def norm(hidden: int) -> Any:
    return operator(RmsNormRequest(hidden=hidden, eps=EPS, dtype="float32"))


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("shape", [(1, 512), (7, 64), (3, 5, 24), (0, 16), (2, 1), (300, 33)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e5])
def test_norm_equals_the_formula(shape: tuple[int, ...], scale: float) -> None:
    x, weight = normal(*shape, seed=1) * scale, normal(shape[-1], seed=2)
    found = norm(shape[-1]).run(x, weight)
    assert found.shape == x.shape
    # A sum of squares of n terms has no cancellation: its relative error is below n roundings, far less in blocks.
    bound = (8 + shape[-1] / 8) * 2.0**-24
    exact = exact_norm(x, weight)
    assert ((found.double() - exact).abs() <= bound * exact.abs() + 1e-30).all()


def test_norm_leaves_its_input_alone() -> None:
    x, weight = normal(3, 16, seed=1), normal(16, seed=2)
    kept = x.clone()
    norm(16).run(x, weight)
    assert torch.equal(x, kept)


def test_norm_takes_heads_out_of_a_merged_projection() -> None:
    merged, weight = normal(5, 12, 16, seed=1), normal(16, seed=2)
    heads = merged[:, 4:10]
    assert torch.equal(norm(16).run(heads, weight), norm(16).run(heads.contiguous(), weight))


def test_add_returns_norm_and_sum_and_leaves_x_alone() -> None:
    x, residual, weight = normal(4, 32, seed=1), normal(4, 32, seed=2), normal(32, seed=3)
    kept, total = x.clone(), x + residual
    normed, summed = norm(32).add(x, residual, weight)
    assert torch.equal(x, kept)
    assert torch.equal(summed, total)
    assert torch.equal(normed, norm(32).run(total, weight))


def test_a_broken_row_breaks_no_other() -> None:
    x, weight = normal(4, 32, seed=1), normal(32, seed=3)
    clean = norm(32).run(x, weight)
    x[1, 0] = float("inf")
    x[2, 0] = float("nan")
    found = norm(32).run(x, weight)
    assert torch.equal(found[[0, 3]], clean[[0, 3]])
    assert found[2].isnan().all()


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_swiglu_equals_the_formula(limit: float | None, rows: int) -> None:
    gate_up = normal(rows, 2 * 24, seed=1) * 3
    found = operator(SwigluRequest(width=24, dtype="float32", limit=limit)).run(gate_up)
    gate, up = gate_up.double().chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    assert close(found, gate * torch.sigmoid(gate) * up)


def test_swiglu_leaves_its_input_alone() -> None:
    gate_up = normal(3, 16, seed=1)
    kept = gate_up.clone()
    operator(SwigluRequest(width=8, dtype="float32", limit=0.1)).run(gate_up)
    assert torch.equal(gate_up, kept)


SCALINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("rotary", "trailing"), [(16, False), (8, False), (8, True), (2, True)])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_rope_equals_the_reference(interleaved: bool, rotary: int, trailing: bool, inverse: bool, scaling: str) -> None:
    request = RopeRequest(
        head_dim=16,
        rotary_dim=rotary,
        theta=1e4,
        dtype="float32",
        max_positions=256,
        interleaved=interleaved,
        trailing=trailing,
        scaling=SCALINGS[scaling],
    )
    x, positions = normal(6, 3, 16, seed=1), torch.tensor([0, 1, 77, 255, 3, 3])
    ours, reference = operator(request), reference_support.operator(request)
    found = ours.run(x, ours.plan(positions), inverse)
    expected = reference.run(x, reference.plan(positions), inverse)
    assert found.shape == x.shape
    assert close(found, expected.double(), size=float(x.abs().max()))


def rope() -> Any:
    return operator(RopeRequest(head_dim=8, rotary_dim=8, theta=1e4, dtype="float32", max_positions=32))


def test_rope_takes_heads_out_of_a_merged_projection() -> None:
    op, merged = rope(), normal(5, 12, 8, seed=1)
    plan = op.plan(torch.arange(5))
    kept = merged.clone()
    assert torch.equal(op.run(merged[:, 3:6], plan), op.run(merged[:, 3:6].contiguous(), plan))
    assert torch.equal(merged, kept)


def test_rope_of_no_rows() -> None:
    op = rope()
    assert op.run(torch.zeros(0, 2, 8), op.plan(torch.zeros(0, dtype=torch.int64))).shape == (0, 2, 8)


def test_a_position_is_turned_the_same_whatever_shares_its_step() -> None:
    op, x = rope(), normal(20, 2, 8, seed=1)
    whole = op.run(x, op.plan(torch.arange(20)))
    assert torch.equal(op.run(x[7:8], op.plan(torch.tensor([7]))), whole[7:8])
