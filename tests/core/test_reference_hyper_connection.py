"""Hyper-connections, against the formula written out in Python's own numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from reference_support import operator

from deepinfer_core.api import HyperConnectionRequest, HyperHeadRequest

M, D, EPS, NORM_EPS = 4, 6, 1e-6, 1e-6
ROWS = (2 + M) * M


def request(iterations: int = 20, eps: float = EPS, dtype: str = "float32") -> HyperConnectionRequest:
    return HyperConnectionRequest(streams=M, hidden=D, iterations=iterations, eps=eps, norm_eps=NORM_EPS, dtype=dtype)


def parameters(rows: int, scales: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, M * D), (rows,), (scales,))
    fn, base, scale = (torch.randn(*shape, generator=generator) for shape in shapes)
    return fn, base, scale


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def numbers(streams: torch.Tensor, weight: Any) -> list[float]:
    """z of one row."""
    fn, flat = weight[0].tolist(), streams.flatten().tolist()
    spread = 1 / math.sqrt(sum(x * x for x in flat) / len(flat) + NORM_EPS)
    return [sum(a * b for a, b in zip(row, flat, strict=True)) * spread for row in fn]


def coefficients(
    streams: torch.Tensor, weight: Any, iterations: int, eps: float
) -> tuple[list[float], list[float], list[list[float]]]:
    z, base, scale = numbers(streams, weight), weight[1].tolist(), weight[2].tolist()
    pre = [sigmoid(z[j] * scale[0] + base[j]) + eps for j in range(M)]
    post = [2 * sigmoid(z[M + j] * scale[1] + base[M + j]) for j in range(M)]
    comb = []
    for j in range(M):
        row = [z[2 * M + j * M + k] * scale[2] + base[2 * M + j * M + k] for k in range(M)]
        total = sum(math.exp(x) for x in row)
        comb.append([math.exp(x) / total + eps for x in row])

    def columns() -> None:
        sums = [sum(comb[j][k] for j in range(M)) + eps for k in range(M)]
        for j in range(M):
            comb[j] = [comb[j][k] / sums[k] for k in range(M)]

    columns()
    for _ in range(iterations - 1):
        for j in range(M):
            total = sum(comb[j]) + eps
            comb[j] = [x / total for x in comb[j]]
        columns()
    return pre, post, comb


@pytest.mark.parametrize(("iterations", "eps"), [(20, 1e-6), (19, 1e-6), (1, 1e-6), (2, 0.1), (20, 0.05)])
def test_mix_and_merge(iterations: int, eps: float) -> None:
    weight = parameters(ROWS, 3)
    streams = torch.randn(5, M, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    output = torch.randn(5, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    op = operator(request(iterations, eps, "float64"))
    packed = op.prepare(*weight)
    mixed, carry = op.mix(streams, packed)
    merged = op.merge(streams.clone(), output, carry)
    for row in range(5):
        pre, post, comb = coefficients(streams[row], weight, iterations, eps)
        h = streams[row]
        assert torch.allclose(mixed[row], sum(pre[j] * h[j] for j in range(M)), atol=1e-12)
        for k in range(M):
            wanted = post[k] * output[row] + sum(comb[j][k] * h[j] for j in range(M))
            assert torch.allclose(merged[row, k], wanted, atol=1e-12)


def test_pre_has_eps_and_post_has_none() -> None:
    """At a bias of -40 the sigmoid is nothing: what is left of pre is eps itself, of post nothing."""
    fn, base, scale = torch.zeros(ROWS, M * D), torch.full((ROWS,), -40.0), torch.zeros(3)
    op = operator(request(eps=1e-3))
    streams = torch.ones(1, M, D)
    mixed, carry = op.mix(streams, op.prepare(fn, base, scale))
    assert torch.allclose(mixed, torch.full((1, D), 4e-3), rtol=1e-5)
    zero, _ = op.mix(streams * 0, op.prepare(fn, base, scale))
    only_output = op.merge(streams * 0, torch.ones(1, D), carry)
    assert torch.equal(zero, torch.zeros(1, D))
    assert only_output.abs().max() < 1e-15


def test_the_twentieth_round_shows() -> None:
    """Logits far from balance: the result after 20 rounds differs from that after 19."""
    weight = list(parameters(ROWS, 3))
    weight[1] = weight[1] * 6
    streams = torch.randn(3, M, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = []
    for iterations in (19, 20):
        op = operator(request(iterations, dtype="float64"))
        _, carry = op.mix(streams, op.prepare(*weight))
        results.append(op.merge(streams.clone(), torch.zeros(3, D, dtype=torch.float64), carry))
        pre, post, comb = coefficients(streams[0], weight, iterations, EPS)
        assert len(pre) == len(post) == M
        wanted = torch.stack([sum(comb[j][k] * streams[0, j] for j in range(M)) for k in range(M)])
        assert torch.allclose(results[-1][0], wanted, atol=1e-10)
    assert (results[0] - results[1]).abs().max() > 1e-6


def test_head() -> None:
    weight = parameters(M, 1, seed=3)
    op = operator(HyperHeadRequest(streams=M, hidden=D, eps=0.01, norm_eps=NORM_EPS, dtype="float64"))
    streams = torch.randn(4, M, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = op.run(streams, op.prepare(*weight))
    for row in range(4):
        z, base, scale = numbers(streams[row], weight), weight[1].tolist(), weight[2].tolist()
        wanted = sum((sigmoid(z[j] * scale[0] + base[j]) + 0.01) * streams[row, j] for j in range(M))
        assert torch.allclose(found[row], wanted, atol=1e-12)


def test_coefficients_stay_in_float32_for_16_bit_streams() -> None:
    weight = parameters(ROWS, 3)
    streams = torch.randn(6, M, D, generator=torch.Generator().manual_seed(1)).bfloat16()
    op, wide = operator(request(dtype="bfloat16")), operator(request())
    mixed, carry = op.mix(streams, op.prepare(*weight))
    wanted, wide_carry = wide.mix(streams.float(), wide.prepare(*weight))
    assert mixed.dtype == torch.bfloat16
    assert torch.equal(mixed, wanted.bfloat16())
    merged = op.merge(streams.clone(), mixed, carry)
    assert torch.equal(merged, wide.merge(streams.float(), mixed.float(), wide_carry).bfloat16())


def test_no_rows() -> None:
    op = operator(request())
    packed = op.prepare(*parameters(ROWS, 3))
    mixed, carry = op.mix(torch.zeros(0, M, D), packed)
    assert mixed.shape == (0, D)
    assert op.merge(torch.zeros(0, M, D), mixed, carry).shape == (0, M, D)
