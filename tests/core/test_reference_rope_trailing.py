"""Rotation of the last channels, and back."""

from __future__ import annotations

import gc

import pytest
import torch
from reference_support import operator

from deepinfer_core.api import RopeRequest
from deepinfer_core.reference import rope


def request(trailing: bool, rotary: int = 4, theta: float = 1e4) -> RopeRequest:
    return RopeRequest(
        head_dim=8,
        rotary_dim=rotary,
        theta=theta,
        dtype="float32",
        max_positions=64,
        interleaved=True,
        trailing=trailing,
    )


X = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0))
POSITIONS = torch.tensor([0, 3, 7, 20, 63])


@pytest.mark.parametrize("rotary", [2, 4, 8])
def test_the_last_channels_are_turned_as_complex_numbers(rotary: int) -> None:
    op = operator(request(True, rotary))
    found = op.run(X, op.plan(POSITIONS))
    assert torch.equal(found[..., : 8 - rotary], X[..., : 8 - rotary])
    pairs = torch.view_as_complex(X[..., 8 - rotary :].reshape(5, 2, -1, 2).double())
    angles = POSITIONS[:, None, None] * 1e4 ** (-torch.arange(0, rotary, 2).double() / rotary)
    wanted = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    assert torch.allclose(found[..., 8 - rotary :].double(), wanted, atol=1e-5)


@pytest.mark.parametrize("trailing", [True, False])
def test_inverse_undoes(trailing: bool) -> None:
    op = operator(request(trailing))
    plan = op.plan(POSITIONS)
    assert torch.allclose(op.run(op.run(X, plan), plan, inverse=True), X, atol=1e-6)
    assert not torch.allclose(op.run(X, plan, inverse=True), op.run(X, plan), atol=1e-2)


def test_operators_with_the_same_angles_share_one_table() -> None:
    gc.collect()
    first, second = operator(request(True)), operator(request(False))
    other = operator(request(True, theta=2e4))
    assert first._table is second._table
    assert first._table is not other._table
    key = next(key for key, table in rope._TABLES.items() if table is other._table)
    del other
    gc.collect()
    assert key not in rope._TABLES
