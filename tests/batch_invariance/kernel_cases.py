"""The kernels for any device that Triton compiles for: on this machine's accelerator, else in Triton's interpreter.

The interpreter multiplies a tile by numpy, whose rows differ by their place in the tile, and bfloat16 by its bits: here
it multiplies by sums in order, and bfloat16 as float32. That the place does not matter is for the matrix unit to hold.
"""

from __future__ import annotations

import os
from typing import Any

import attrs
import pytest
import torch
from deepinfer_batch_invariance.self_check import same_bits
from invariance import CAP, DEVICE, MOST_ROWS, check_company, context, normal, reference_operator

from deepinfer_core.api import (
    LinearRequest,
    MoeExchangeRequest,
    OpRequest,
    PlanError,
    RmsNormRequest,
    SamplingRequest,
)

if not torch.accelerator.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

pytest.importorskip("triton", reason="the kernels need triton")

from deepinfer_batch_invariance import plugin, triton_gemm, triton_ops

if os.environ.get("TRITON_INTERPRET") == "1":
    import numpy as np
    from triton.runtime import interpreter

    def in_order(builder: Any, a: Any, b: Any, total: Any, *_: Any) -> Any:
        """``a [m, k] @ b [k, n] + total``, one k after the other."""

        def floats(handle: Any) -> Any:
            if handle.dtype.name != "bf16":
                return handle.data
            return (handle.data.astype(np.uint32) << 16).view(np.float32)

        left, right, result = floats(a), floats(b), total.data.copy()
        for k in range(left.shape[1]):
            result += left[:, k, None] * right[k]
        return interpreter.TensorHandle(result, total.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = in_order

DEMANDS = frozenset({CAP})
ON = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
HARDWARE = ON.type != "cpu"
ROWS = MOST_ROWS if HARDWARE else 70
DTYPES = ("float32", "bfloat16")
NEAR = {"float32": 1e-4, "bfloat16": 2e-2}
HERE = attrs.evolve(context(), device=ON)


def here(*shape: int, seed: int = 0, dtype: str = "float32") -> torch.Tensor:
    return normal(*shape, seed=seed, dtype=getattr(torch, dtype)).to(ON)


def near(found: torch.Tensor, wanted: torch.Tensor, dtype: str, terms: int = 1) -> None:
    """``wanted`` is the reference's answer to the same numbers in float64, sums of that many products."""
    close = {"rtol": NEAR[dtype], "atol": NEAR[dtype] * max(1, terms / 100) ** 0.5}
    torch.testing.assert_close(found.cpu().double(), wanted, equal_nan=True, **close)


def exact(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.cpu().double() for tensor in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("inner", "out", "bias"),
    [(40, 70, False), (33, 5, True), (300, 70, True), *([(2560, 1024, False), (9728, 2560, True)] if HARDWARE else [])],
)
def test_gemm(inner: int, out: int, bias: bool, dtype: str) -> None:
    request = LinearRequest(
        in_features=inner, out_features=out, bias=bias, dtype=dtype, out_dtype=dtype, weight_dtype=dtype
    )
    op, x = triton_gemm.FixedTileLinear(request, HERE), here(ROWS, inner, dtype=dtype)
    part, shift = here(out, inner, seed=1, dtype=dtype), here(out, seed=2, dtype=dtype) if bias else None
    weight = op.prepare([part], shift)
    whole = op.run(x, weight)
    wanted = torch.nn.functional.linear(*exact(x, part), None if shift is None else exact(shift)[0])
    near(whole, wanted, dtype, inner)
    for rows in (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, ROWS):
        assert same_bits(op.run(x[:rows], weight), whole[:rows]), rows
    check_company(lambda picked: op.run(x[picked], weight), ROWS)
    for row in range(0, ROWS, 1 if HARDWARE else 7):
        assert same_bits(op.run(x[row : row + 1], weight)[0], whole[row]), row
    assert op.run(x[:0], weight).shape == (0, out)
    assert torch.equal(op.run(x.T.contiguous().T, weight), whole)


@pytest.mark.skipif(HARDWARE, reason="plants another order of adding into the interpreter")
def test_a_tile_of_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    request = LinearRequest(
        in_features=70, out_features=20, bias=False, dtype="bfloat16", out_dtype="float32", weight_dtype="bfloat16"
    )
    op, x, part = triton_gemm.FixedTileLinear(request, HERE), here(40, 70, dtype="bfloat16"), here(20, 70, seed=1)

    def backwards(builder: Any, a: Any, b: Any, total: Any, *_: Any) -> Any:
        """Tiles of 16 rows add up from the end of a step."""
        if a.data.shape[0] == 16:
            a.data, b.data = a.data[:, ::-1], b.data[::-1]
        return in_order(builder, a, b, total)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", backwards)
    weight = op.prepare([part])
    assert [tile.m for tile in op._tiles] == [tile.m for tile in triton_gemm.NARROW if tile.m != 16]
    assert same_bits(op.run(x[:1], weight), op.run(x, weight)[:1])


@pytest.mark.skipif(HARDWARE, reason="plants sums that depend on a row's place into the interpreter")
def test_a_device_that_moves_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    request = LinearRequest(
        in_features=70, out_features=20, bias=False, dtype="float32", out_dtype="float32", weight_dtype="float32"
    )

    def by_place(builder: Any, a: Any, b: Any, total: Any, *_: Any) -> Any:
        found = in_order(builder, a, b, total)
        found.data[1::2] *= np.float32(1 + 2**-20)
        return found

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", by_place)
    with pytest.raises(PlanError, match="gemm of 70 to 20 channels"):
        triton_gemm.FixedTileLinear(request, HERE).prepare([here(20, 70)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 48, 65, *([2560] if HARDWARE else [])])
def test_norm(hidden: int, dtype: str) -> None:
    request = RmsNormRequest(hidden=hidden, eps=1e-6, dtype=dtype)
    op, x, weight = triton_ops.RowNorm(request, HERE), here(ROWS, hidden, dtype=dtype), here(hidden, seed=1)
    weight = weight.to(x.dtype)
    check_company(lambda picked: op.add(x[picked], x[picked] * 2, weight), ROWS)
    double = attrs.evolve(request, dtype="float64")
    near(op.run(x, weight), reference_operator(double).run(*exact(x, weight)), dtype)
    assert op.run(x[:0], weight).shape == (0, hidden)


@pytest.mark.parametrize("vocab", [5, 1500, *([151936] if HARDWARE else [])])
def test_log_softmax(vocab: int) -> None:
    request = SamplingRequest(stage="logprobs", vocab_size=vocab)
    rows = ROWS if HARDWARE else 9
    op, logits = triton_ops.RowLogprobs(request, HERE), here(rows, vocab) * 4
    ids = torch.arange(rows, device=ON) % 5
    ids[5] = -1

    def run(picked: Any) -> Any:
        found = op.run(logits[picked], ids[picked], 3)
        return found.chosen, found.rank, found.top_ids, found.top

    check_company(run, rows)
    wanted = reference_operator(request).run(logits.cpu(), ids.cpu(), 3)
    found = op.run(logits, ids, 3)
    assert torch.equal(found.rank.cpu(), wanted.rank)
    assert torch.equal(found.top_ids.cpu(), wanted.top_ids)
    near(found.chosen, wanted.chosen.double(), "float32")
    near(found.top, wanted.top.double(), "float32")


@pytest.mark.parametrize("dtype", DTYPES)
def test_combine(dtype: str) -> None:
    rows, hidden = (ROWS, 1030) if HARDWARE else (12, 20)
    request = MoeExchangeRequest(experts=6, top_k=3, hidden=hidden, dtype=dtype)
    op, x = triton_ops.OrderedExchange(request, HERE), here(rows, hidden, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(6, generator=generator)[:3].sort().values for _ in range(rows)]).to(ON)
    weights = torch.rand(rows, 3, generator=generator).to(ON)

    def run(picked: Any) -> torch.Tensor:
        sent = op.dispatch(x[picked], ids[picked], weights[picked])
        return op.combine((sent.rows * sent.weights[:, None]).to(x.dtype), sent.handle)

    check_company(run, rows)
    products = (x[:, None] * weights[..., None]).to(x.dtype)
    near(run(list(range(rows))), exact(products)[0].sum(1), "float32")


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
