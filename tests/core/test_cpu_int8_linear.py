"""The host's 8-bit linear layer against its own rounding done by hand, and against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpu_support import normal, operator, verdicts

from deepinfer_core.api import ConfigError, LinearRequest
from deepinfer_core.cpu import int8_linear as module


def request(inp: int, out: int, bias: bool = False) -> LinearRequest:
    return LinearRequest(
        in_features=inp, out_features=out, dtype="float32", out_dtype="float32", weight_dtype="gguf:q4_1", bias=bias
    )


@pytest.fixture
def build() -> Any:
    if not module.can_multiply_bytes():
        pytest.skip("needs oneDNN and a processor with VNNI")
    return lambda *args, **kwargs: operator(request(*args, **kwargs), "int8_linear")


def by_hand(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Both factors rounded to 127 steps of their row's largest magnitude, then multiplied in float64."""

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        largest = rows.double().abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
        return (rows.double() / largest * 127).round() / 127 * largest

    return rounded(x) @ rounded(weight).T


@pytest.mark.parametrize(("inp", "out"), [(64, 24), (576, 100), (17, 33), (1, 1), (300, 7)])
@pytest.mark.parametrize("rows", [1, 2, 5, 33])
def test_equals_its_definition(build: Any, inp: int, out: int, rows: int) -> None:
    op, weight, x = build(inp, out), normal(out, inp, seed=1), normal(rows, inp, seed=2)
    found, expected = op.run(x, op.prepare([weight])), by_hand(x, weight)
    # A product within a rounding of half a step may go either way: one step of one factor in that sum.
    step = (x.abs().amax(1, keepdim=True) * weight.abs().amax(1)).double() / 127
    assert ((found.double() - expected).abs() <= 2 * step).all()
    assert ((found.double() - expected).abs() <= 1e-4 * expected.abs().max()).double().mean() > 0.9


def test_is_close_to_the_exact_product(build: Any) -> None:
    op, weight, x = build(512, 256), normal(256, 512, seed=1), normal(16, 512, seed=2)
    exact = x.double() @ weight.double().T
    error = (op.run(x, op.prepare([weight])).double() - exact).norm() / exact.norm()
    # Rounding to steps of size s adds noise of variance s^2 / 12; the largest of 512 normals is near 3.2 deviations.
    assert 0.003 < error < 2 * (2 / 12) ** 0.5 * 3.5 / 127


def test_rows_are_independent_of_each_other(build: Any) -> None:
    op, x = build(64, 24), normal(40, 64, seed=2)
    x[7] *= 1e6
    packed = op.prepare([normal(24, 64, seed=1)])
    together = op.run(x, packed)
    for row in (0, 7, 39):
        assert torch.equal(op.run(x[row : row + 1], packed)[0], together[row])


def test_a_broken_row_breaks_no_other(build: Any) -> None:
    op, x = build(32, 20), normal(4, 32, seed=2)
    packed = op.prepare([normal(20, 32, seed=1)])
    clean = op.run(x, packed)
    x[1, 3], x[2, 3] = float("nan"), float("inf")
    found = op.run(x, packed)
    assert found[1].isnan().all()
    assert not found[2].isfinite().any()
    assert torch.equal(found[[0, 3]], clean[[0, 3]])


def test_rows_and_channels_of_zeros(build: Any) -> None:
    op, x, weight = build(32, 20), normal(2, 32, seed=2), normal(20, 32, seed=1)
    x[0], weight[3] = 0.0, 0.0
    found = op.run(x, op.prepare([weight]))
    assert (found[0] == 0).all()
    assert found[1, 3] == 0


def test_parts_are_stacked_and_bias_is_added_exactly(build: Any) -> None:
    parts, bias, x = [normal(12, 32, seed=1), normal(8, 32, seed=3)], normal(20, seed=4), normal(3, 32, seed=2)
    with_bias, plain = build(32, 20, bias=True), build(32, 20)
    expected = plain.run(x, plain.prepare([torch.cat(parts)])) + bias
    assert torch.equal(with_bias.run(x, with_bias.prepare(parts, bias)), expected)


def test_rows_may_be_strided(build: Any) -> None:
    op, x = build(32, 20), normal(32, 4, seed=2).T
    packed = op.prepare([normal(20, 32, seed=1)])
    assert torch.equal(op.run(x, packed), op.run(x.contiguous(), packed))


def test_no_rows(build: Any) -> None:
    op = build(32, 20)
    assert op.run(torch.zeros(0, 32), op.prepare([normal(20, 32, seed=1)])).shape == (0, 20)


def test_it_is_never_chosen_unasked() -> None:
    found = verdicts(request(32, 20))
    assert found["packed_linear"].score > found["int8_linear"].score
    assert "8 bits" in found["int8_linear"].reason


def test_a_processor_without_byte_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "can_multiply_bytes", lambda: False)
    with pytest.raises(ConfigError, match=r"cpu:int8_linear.*VNNI.*gemm.linear"):
        operator(request(32, 20), "int8_linear")
