"""The host's hyper-connections against the reference."""

from __future__ import annotations

import warnings

import pytest
import torch
from cpu_support import HOST
from reference_support import operator

from deepinfer_core.api import BuildContext, HyperConnectionRequest, HyperHeadRequest, OpRequest
from deepinfer_core.cpu import plugin
from deepinfer_core.cpu.hyper_connection import HyperConnection, HyperHead


def context() -> BuildContext:
    return BuildContext(
        device=torch.device("cpu"),
        max_tokens=64,
        max_requests=8,
        max_model_len=64,
        num_threads=1,
        settings=None,
        reference=operator,
    )


def connection(streams: int, hidden: int, iterations: int = 20, eps: float = 1e-6) -> HyperConnectionRequest:
    return HyperConnectionRequest(
        streams=streams, hidden=hidden, iterations=iterations, eps=eps, norm_eps=1e-6, dtype="float32"
    )


def weights(rows: int, width: int, scales: int, size: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes: list[tuple[int, ...]] = [(rows, width), (rows,), (scales,)]
    return [torch.randn(*shape, generator=generator) * size for shape in shapes]


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@pytest.mark.parametrize(("streams", "hidden"), [(4, 32), (2, 7), (3, 5)])
@pytest.mark.parametrize(("iterations", "eps"), [(20, 1e-6), (1, 1e-6), (5, 0.1)])
def test_like_the_reference(rows: int, streams: int, hidden: int, iterations: int, eps: float) -> None:
    request = connection(streams, hidden, iterations, eps)
    parameters = weights((2 + streams) * streams, streams * hidden, 3)
    generator = torch.Generator().manual_seed(rows)
    h = torch.randn(rows, streams, hidden, generator=generator) * 3
    output = torch.randn(rows, hidden, generator=generator)
    ours, theirs = HyperConnection(request, context()), operator(request)
    mixed, carry = ours.mix(h, ours.prepare(*parameters))
    wanted, wanted_carry = theirs.mix(h, theirs.prepare(*parameters))
    assert torch.allclose(mixed, wanted, atol=2e-5, rtol=1e-5)
    merged = theirs.merge(h.clone(), output, wanted_carry)
    assert torch.allclose(ours.merge(h.clone(), output, carry), merged, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 5])
def test_head_like_the_reference(rows: int) -> None:
    request = HyperHeadRequest(streams=4, hidden=16, eps=1e-2, norm_eps=1e-6, dtype="float32")
    parameters = weights(4, 64, 1)
    h = torch.randn(rows, 4, 16, generator=torch.Generator().manual_seed(1))
    ours, theirs = HyperHead(request, context()), operator(request)
    wanted = theirs.run(h, theirs.prepare(*parameters))
    assert torch.allclose(ours.run(h, ours.prepare(*parameters)), wanted, atol=1e-5)


def test_extreme_coefficients_saturate_silently() -> None:
    request = connection(4, 8)
    parameters = weights(24, 32, 3, size=60.0)
    h = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(1))
    ours, theirs = HyperConnection(request, context()), operator(request)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mixed, carry = ours.mix(h, ours.prepare(*parameters))
    wanted, wanted_carry = theirs.mix(h, theirs.prepare(*parameters))
    assert torch.allclose(mixed, wanted, atol=1e-5)
    zero = torch.zeros(6, 8)
    assert torch.allclose(ours.merge(h, zero, carry), theirs.merge(h, zero, wanted_carry), atol=1e-4)


def test_a_row_of_nan_harms_no_neighbour() -> None:
    request = connection(4, 8)
    op = HyperConnection(request, context())
    packed = op.prepare(*weights(24, 32, 3))
    h = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1))
    clean, carry = op.mix(h, packed)
    merged = op.merge(h, clean, carry)
    h[1, 2, 3] = float("nan")
    mixed, carry = op.mix(h, packed)
    assert torch.equal(mixed[[0, 2]], clean[[0, 2]])
    assert torch.equal(op.merge(h, mixed, carry)[[0, 2]], merged[[0, 2]])


def test_inputs_are_left_alone() -> None:
    op = HyperConnection(connection(4, 8), context())
    parameters = weights(24, 32, 3)
    copies = [tensor.clone() for tensor in parameters]
    h = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1))
    before = h.clone()
    mixed, _ = op.mix(h, op.prepare(*parameters))
    op.mix(h, op.prepare(*parameters))
    assert torch.equal(h, before)
    assert mixed.shape == (3, 8)
    assert all(torch.equal(a, b) for a, b in zip(parameters, copies, strict=True))


def test_no_rows() -> None:
    op = HyperConnection(connection(4, 8), context())
    packed = op.prepare(*weights(24, 32, 3))
    mixed, carry = op.mix(torch.zeros(0, 4, 8), packed)
    assert op.merge(torch.zeros(0, 4, 8), mixed, carry).shape == (0, 4, 8)
    head = HyperHead(HyperHeadRequest(streams=4, hidden=8, eps=0.1, norm_eps=1e-6, dtype="float32"), context())
    assert head.run(torch.zeros(0, 4, 8), head.prepare(*weights(4, 32, 1))).shape == (0, 8)


@pytest.mark.parametrize(("field", "value"), [("dtype", "bfloat16"), ("device_type", "meta")])
def test_what_it_does_not_serve(field: str, value: str) -> None:
    request: OpRequest = HyperConnectionRequest(
        **{"streams": 4, "hidden": 8, "iterations": 20, "eps": 1e-6, "norm_eps": 1e-6, "dtype": "float32"}
        | {field: value}
    )

    (provider,) = [p for p in plugin.deepinfer_pointwise(HOST) if p.op == request.op]
    assert not provider.supports(request)
