"""The kernels for any device that Triton compiles for, in its interpreter: float32, small shapes.

Not run on hardware.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from deepinfer_batch_invariance.self_check import same_bits
from invariance import CAP, DEVICE, check_company, context, normal, reference_operator

from deepinfer_core.api import (
    LinearRequest,
    MoeExchangeRequest,
    OpRequest,
    RmsNormRequest,
    SamplingRequest,
)

if not torch.accelerator.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

pytest.importorskip("triton", reason="the kernels need triton")

from deepinfer_batch_invariance import plugin, triton_ops

ROWS = 70
DEMANDS = frozenset({CAP})


@pytest.mark.parametrize(("inner", "out", "bias"), [(40, 70, False), (33, 5, True)])
def test_gemm(inner: int, out: int, bias: bool) -> None:
    request = LinearRequest(
        in_features=inner, out_features=out, bias=bias, dtype="float32", out_dtype="float32", weight_dtype="float32"
    )
    op, parts, x = triton_ops.FixedTileLinear(request, context()), [normal(out, inner, seed=1)], normal(ROWS, inner)
    shift = normal(out, seed=2) if bias else None
    weight = op.prepare(parts, shift)
    # The interpreter multiplies a tile by numpy, whose rows differ by their place in it; places are kept here. That
    # the place does not matter is the matrix unit's to hold.
    whole, tile = op.run(x, weight), triton_ops.BLOCK_M
    for rows in (1, 2, 3, tile - 1, tile, tile + 1, 2 * tile):
        assert same_bits(op.run(x[:rows], weight), whole[:rows])
    assert same_bits(op.run(x[2 * tile :], weight), whole[2 * tile :])
    exact = reference_operator(request)
    assert torch.allclose(op.run(x, weight), exact.run(x, exact.prepare(parts, shift)), rtol=1e-4, atol=1e-4)
    assert op.run(x[:0], weight).shape == (0, out)
    assert torch.equal(op.run(x.T.contiguous().T, weight), op.run(x, weight))


@pytest.mark.parametrize("hidden", [1, 48, 65])
def test_norm(hidden: int) -> None:
    request = RmsNormRequest(hidden=hidden, eps=1e-6, dtype="float32")
    op, x, weight = triton_ops.RowNorm(request, context()), normal(20, hidden), normal(hidden, seed=1)
    check_company(lambda picked: op.add(x[picked], x[picked] * 2, weight), 20)
    assert torch.allclose(op.run(x, weight), reference_operator(request).run(x, weight), rtol=1e-5, atol=1e-6)
    assert op.run(x[:0], weight).shape == (0, hidden)


@pytest.mark.parametrize("vocab", [5, 1500])
def test_log_softmax(vocab: int) -> None:
    request = SamplingRequest(stage="logprobs", vocab_size=vocab)
    op, logits = triton_ops.RowLogprobs(request, context()), normal(9, vocab) * 4
    ids = torch.tensor([0, 1, 2, 3, 4, -1, 0, 1, 2])

    def run(picked: Any) -> Any:
        found = op.run(logits[picked], ids[picked], 3)
        return found.chosen, found.rank, found.top_ids, found.top

    check_company(run, 9)
    wanted = reference_operator(request).run(logits, ids, 3)
    found = op.run(logits, ids, 3)
    assert torch.equal(found.rank, wanted.rank)
    assert torch.equal(found.top_ids, wanted.top_ids)
    assert torch.allclose(found.chosen, wanted.chosen, rtol=1e-5, equal_nan=True)


def test_combine() -> None:
    request = MoeExchangeRequest(experts=6, top_k=3, hidden=20, dtype="float32")
    op, x = triton_ops.OrderedExchange(request, context()), normal(12, 20)
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(6, generator=generator)[:3].sort().values for _ in range(12)])
    weights = torch.rand(12, 3, generator=generator)

    def run(picked: Any) -> torch.Tensor:
        sent = op.dispatch(x[picked], ids[picked], weights[picked])
        return op.combine(sent.rows * sent.weights[:, None], sent.handle)

    check_company(run, 12)
    assert torch.allclose(run(list(range(12))), x * weights.sum(1)[:, None], rtol=1e-5, atol=1e-6)


REQUESTS: list[tuple[OpRequest, str]] = [
    (
        LinearRequest(
            in_features=8,
            out_features=8,
            dtype="bfloat16",
            out_dtype="bfloat16",
            weight_dtype="bfloat16",
            device_type="other",
            demands=DEMANDS,
        ),
        "triton_linear",
    ),
    (RmsNormRequest(hidden=8, eps=1e-6, dtype="bfloat16", device_type="other", demands=DEMANDS), "triton_rms_norm"),
    (SamplingRequest(stage="logprobs", vocab_size=8, device_type="other", demands=DEMANDS), "triton_logprobs"),
    (
        MoeExchangeRequest(experts=4, top_k=2, hidden=8, dtype="bfloat16", device_type="other", demands=DEMANDS),
        "triton_local",
    ),
]


@pytest.mark.parametrize(("request_", "name"), REQUESTS, ids=[name for _, name in REQUESTS])
def test_they_serve_other_devices_than_the_host(request_: OpRequest, name: str) -> None:
    import attrs

    hooks = (
        plugin.deepinfer_gemm,
        plugin.deepinfer_pointwise,
        plugin.deepinfer_moe_communication,
        plugin.deepinfer_sampling,
    )
    offered = [provider for hook in hooks for provider in hook(DEVICE) if provider.op == request_.op]
    scores = {p.name: p.supports(request_).score for p in offered}
    assert max(scores, key=lambda own: scores[own] or 0) == name
    on_host = attrs.evolve(request_, device_type="cpu")
    assert {p.name: p.supports(on_host).score for p in offered}[name] is None
