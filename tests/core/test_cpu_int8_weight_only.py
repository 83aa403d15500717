"""The host's 8-bit weights against the same rounding done by hand, and against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpu_support import normal, operator, verdicts

from deepinfer_core.api import ConfigError, LinearRequest, ProbeEnv
from deepinfer_core.cpu import int8_weight_only as module
from deepinfer_core.cpu import plugin

BFLOAT16 = 2.0**-8  # largest relative error of a rounding to bfloat16, and a little


def request(inp: int, out: int, bias: bool = False) -> LinearRequest:
    return LinearRequest(
        in_features=inp, out_features=out, dtype="float32", out_dtype="float32", weight_dtype="gguf:q4_1", bias=bias
    )


def build(inp: int, out: int, bias: bool = False) -> Any:
    return operator(request(inp, out, bias), "int8_weight_only")


def by_hand(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Weights in whole steps of their channel's scale, x in bfloat16; the product in float64."""
    scale = (weight.abs().amax(dim=1).clamp(min=1e-30) / 127).bfloat16().double()[:, None]
    steps = (weight.double() / scale).round().clamp(-128, 127)
    return x.bfloat16().double() @ (steps * scale).T


@pytest.mark.parametrize(("inp", "out"), [(64, 24), (576, 100), (32, 33), (32, 1), (320, 7), (96, 1000)])
@pytest.mark.parametrize("rows", [1, 2, 5, 33])
def test_equals_its_definition(inp: int, out: int, rows: int) -> None:
    op, weight, x = build(inp, out), normal(out, inp, seed=1), normal(rows, inp, seed=2)
    found, expected = op.run(x, op.prepare([weight])), by_hand(x, weight)
    assert found.dtype == torch.float32
    # One rounding of the result, and a float32 sum of K products.
    size = x.abs().double() @ weight.abs().double().T
    assert ((found.double() - expected).abs() <= BFLOAT16 * expected.abs() + (inp + 8) * 2.0**-23 * size).all()


def test_is_close_to_the_exact_product() -> None:
    op, weight, x = build(512, 256), normal(256, 512, seed=1), normal(16, 512, seed=2)
    exact = x.double() @ weight.double().T
    error = (op.run(x, op.prepare([weight])).double() - exact).norm() / exact.norm()
    # Steps of size s add noise of variance s^2 / 12; the largest of 512 normals is near 3.2 deviations.
    assert 0.002 < error < 1.5 * 3.5 / 127 / 12**0.5 + BFLOAT16


def test_no_weight_is_cut_off() -> None:
    """The scale is rounded: where that makes it smaller, the largest weight must still fit."""
    op, weight = build(32, 300), normal(300, 32, seed=1)
    found = op.run(torch.eye(32), op.prepare([weight])).T
    largest = weight.abs().amax(dim=1, keepdim=True)
    assert ((found - weight).abs() <= largest * (1 / 127 + 2 * BFLOAT16)).all()


def test_rows_are_independent_of_each_other() -> None:
    op, x = build(64, 24), normal(40, 64, seed=2)
    x[7] *= 1e6
    packed = op.prepare([normal(24, 64, seed=1)])
    together = op.run(x, packed)
    for row in (0, 7, 39):
        assert torch.equal(op.run(x[row : row + 1], packed)[0], together[row])


def test_a_broken_row_breaks_no_other() -> None:
    op, x = build(32, 20), normal(4, 32, seed=2)
    packed = op.prepare([normal(20, 32, seed=1)])
    clean = op.run(x, packed)
    x[1, 3], x[2, 3] = float("nan"), float("inf")
    found = op.run(x, packed)
    assert found[1].isnan().all()
    assert not found[2].isfinite().all()
    assert torch.equal(found[[0, 3]], clean[[0, 3]])


def test_rows_and_channels_of_zeros() -> None:
    op, x, weight = build(32, 20), normal(2, 32, seed=2), normal(20, 32, seed=1)
    x[0], weight[3] = 0.0, 0.0
    found = op.run(x, op.prepare([weight]))
    assert (found[0] == 0).all()
    assert found[1, 3] == 0


def test_parts_are_stacked_and_bias_is_added_in_float32() -> None:
    parts, bias, x = [normal(12, 32, seed=1), normal(8, 32, seed=3)], normal(20, seed=4), normal(3, 32, seed=2)
    with_bias, plain = build(32, 20, bias=True), build(32, 20)
    expected = plain.run(x, plain.prepare([torch.cat(parts)])) + bias
    assert torch.equal(with_bias.run(x, with_bias.prepare(parts, bias)), expected)


def test_rows_may_be_strided() -> None:
    op, x = build(32, 20), normal(32, 4, seed=2).T
    packed = op.prepare([normal(20, 32, seed=1)])
    assert torch.equal(op.run(x, packed), op.run(x.contiguous(), packed))


def test_no_rows() -> None:
    op = build(32, 20)
    assert op.run(torch.zeros(0, 32), op.prepare([normal(20, 32, seed=1)])).shape == (0, 20)


def test_it_takes_a_quarter_of_the_memory() -> None:
    op = build(128, 64)
    packed = op.prepare([normal(64, 128, seed=1)])
    assert packed.weight.untyped_storage().nbytes() == 64 * 128


def test_it_is_never_chosen_unasked() -> None:
    (device,) = plugin.deepinfer_probe(ProbeEnv(environ={}))
    (found,) = [p for p in plugin.deepinfer_gemm(device) if p.name == "int8_weight_only"]
    assert found.on_request
    assert "8 bits" in found.supports(request(32, 20)).reason


def test_widths_that_the_kernel_would_read_past_are_refused() -> None:
    assert "multiple of 32, not 48" in verdicts(request(48, 20))["int8_weight_only"].reason


def test_a_torch_without_the_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_multiply", None)
    with pytest.raises(ConfigError, match=r"cpu:int8_weight_only.*no 8-bit weight kernel.*gemm.linear"):
        build(32, 20)
