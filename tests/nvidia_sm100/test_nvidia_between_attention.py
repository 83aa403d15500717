"""Norms at the ends of products, and the region made of such products, against float64 formulas and the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepinfer_nvidia_sm100 import tables
from deepinfer_nvidia_sm100.ops.between_attention import ROWS_ALONE, BetweenAttention
from deepinfer_nvidia_sm100.ops.few_rows import Tile, launch
from deepinfer_nvidia_sm100.ops.normed_rows import Add, Scale
from deepinfer_nvidia_sm100.plugin import deepinfer_fused
from gpu_support import DEVICE, DTYPES, INFO, ON_GPU, context, eligible, here, on_cuda
from reference_support import operator as reference

from deepinfer_core.api import BetweenAttentionRequest, BetweenWeights

EPS = 1e-5
ROUNDING = {"float32": 2e-5, "bfloat16": 1.6e-2, "float16": 2e-3}


def normal(*shape: int, dtype: str = "float32", scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(getattr(torch, dtype))


def near(found: torch.Tensor, expected: torch.Tensor, dtype: str, steps: int = 1) -> None:
    """Up to so many roundings of numbers of this size."""
    tolerance = steps * ROUNDING[dtype]
    torch.testing.assert_close(found.cpu().double(), expected.cpu().double(), rtol=tolerance, atol=tolerance)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + EPS) * weight


def tile(block_n: int, splits: int, described: bool = False, block_m: int = 16, late: bool = False) -> Tile:
    return Tile(
        block_n=block_n, block_m=block_m, block_k=64, splits=splits, stages=2, warps=4, described=described, late=late
    )


TILES = [
    tile(64, 1),
    tile(64, 3, late=True),
    tile(128, 2),
    tile(64, 2, True),
    tile(64, 1, True, 32, late=True),
    tile(16, 2),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chosen", TILES, ids=str)
@pytest.mark.parametrize(("rows", "out", "inner"), [(1, 128, 256), (5, 200, 328), (33, 72, 64)])
def test_a_product_that_adds_to_the_residual(
    rows: int, out: int, inner: int, chosen: Tile, bias: bool, dtype: str
) -> None:
    """Sums, sums times the norm's weight, and squares by tiles, where nothing but these is written."""
    x, weight = normal(rows, inner, dtype=dtype), normal(out, inner, dtype=dtype, scale=inner**-0.5)
    before, norm, shift = normal(rows, out, dtype=dtype), normal(out, dtype=dtype), normal(out, dtype=dtype)
    tiles = -(-out // chosen.block_n)
    residual, found = here(before.clone()), torch.full((rows, out), torch.nan, dtype=x.dtype, device=DEVICE)
    squares = torch.full((tiles + 1, rows), torch.nan, device=DEVICE)
    arrived = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    launch(
        here(x), here(weight), here(shift) if bias else None, found, chosen, arrived,
        add=Add(residual, here(norm), squares),
    )  # fmt: skip
    expected = x.double() @ weight.double().T + before.double() + (shift.double() if bias else 0)
    near(residual, expected, dtype)
    near(found, residual.cpu().double() * norm.double(), dtype)
    padded = torch.nn.functional.pad(residual.cpu().double(), (0, tiles * chosen.block_n - out))
    torch.testing.assert_close(
        squares[:tiles].cpu().double(), padded.view(rows, tiles, -1).square().sum(2).T, rtol=1e-5, atol=1e-6
    )
    assert bool(squares[tiles].isnan().all())
    assert not arrived.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("chosen", TILES, ids=str)
@pytest.mark.parametrize(("rows", "out", "inner", "parts"), [(1, 128, 256, 4), (5, 96, 328, 7), (33, 64, 64, 1)])
def test_a_product_whose_results_the_norm_scales(
    rows: int, out: int, inner: int, parts: int, chosen: Tile, gated: bool, dtype: str
) -> None:
    if gated and chosen.described:
        chosen = tile(2 * chosen.block_n, 1, True, chosen.block_m, chosen.late)
    x, weight = normal(rows, inner, dtype=dtype), normal(out, inner, dtype=dtype, scale=inner**-0.5)
    squares = (torch.rand(parts, rows) + 0.1) * inner / parts
    shift = normal(out, dtype=dtype)
    found = torch.full((rows, out // 2 if gated else out), torch.nan, dtype=x.dtype, device=DEVICE)
    arrived = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    scale = Scale(here(squares), parts, EPS)
    launch(here(x), here(weight), here(shift), found, chosen, arrived, gated=gated, scale=scale)
    size = torch.rsqrt(squares.double().sum(0) / inner + EPS)
    expected = x.double() @ weight.double().T * size[:, None] + shift.double()
    if gated:
        gate, up = expected.chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * up
    near(found, expected, dtype, 1 + gated)
    assert not arrived.any()


def request(dtype: str, **changes: Any) -> BetweenAttentionRequest:
    fields: dict[str, Any] = {"hidden": 128, "attended": 96, "width": 160, "merged": 192, "eps": EPS}
    return BetweenAttentionRequest(**(fields | {"dtype": dtype, "weight_dtype": dtype} | changes))


def weights_of(wanted: BetweenAttentionRequest, draw: Any) -> dict[str, tuple[list[torch.Tensor], torch.Tensor | None]]:
    """Part -> its weights as a checkpoint has them, and its bias."""
    hidden, dtype = wanted.hidden, wanted.dtype
    shapes = {
        "attention_out": ([hidden], wanted.attended, wanted.attention_bias),
        "gate_up": ([wanted.width] * 2, hidden, wanted.mlp_bias),
        "down": ([hidden], wanted.width, wanted.mlp_bias),
        "qkv": ([wanted.merged - 64, 32, 32], hidden, wanted.attention_bias),
    }
    return {
        part: (
            [draw(out, inner, dtype=dtype, scale=inner**-0.5) for out in outs],
            draw(sum(outs), dtype=dtype) if bias else None,
        )
        for part, (outs, inner, bias) in shapes.items()
    }


def formula(
    wanted: BetweenAttentionRequest, attended: torch.Tensor, residual: torch.Tensor, given: Any, norms: Any, last: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    def times(x: torch.Tensor, part: str) -> torch.Tensor:
        weights, bias = given[part]
        return x @ torch.cat(weights).double().T + (0 if bias is None else bias.double())

    first, second = (norm.double() for norm in norms)
    total = residual.double() + times(attended.double(), "attention_out")
    gate, up = times(normed(total, first), "gate_up").chunk(2, 1)
    if wanted.limit is not None:
        gate, up = gate.clamp(max=wanted.limit), up.clamp(-wanted.limit, wanted.limit)
    total = total + times(torch.nn.functional.silu(gate) * up, "down")
    rows = normed(total, second)
    return (rows if last else times(rows, "qkv")), total


KINDS = [{}, {"attention_bias": True}, {"mlp_bias": True, "limit": 0.7}]
QWEN3 = {"hidden": 2560, "attended": 4096, "width": 9728, "merged": 6144}
SIZES: list[dict[str, int]] = [{}, QWEN3] if ON_GPU else [{}]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_region(size: dict[str, int], kind: dict[str, Any], last: bool) -> None:
    """Numbers of rows on both sides of where cuBLAS takes over; the residual may be overwritten, nothing else is."""
    dtype = "bfloat16" if ON_GPU else "float32"
    wanted = request(dtype, **size, **kind)
    op, theirs = BetweenAttention(on_cuda(wanted), context()), reference(wanted)
    if not ON_GPU:  # which has no tiles in float32
        tiles = dict(zip(("attention_out", "gate_up", "down", "qkv"), TILES, strict=False))
        op.tiles = dict.fromkeys(range(1, 40), tiles)
    given = weights_of(wanted, normal)
    moved = {part: ([here(w) for w in ws], None if b is None else here(b)) for part, (ws, b) in given.items()}
    norms = [normal(wanted.hidden, dtype=dtype) for _ in range(2)]

    def packed(which: Any, source: Any, place: Any) -> BetweenWeights:
        parts = {part: which.prepare(part, *source[part]) for part in ("attention_out", "gate_up", "down", "qkv")}
        qkv = parts.pop("qkv")
        return BetweenWeights(norm=place(norms[0]), next_norm=place(norms[1]), next_qkv=None if last else qkv, **parts)

    ours = packed(op, moved, here)
    for rows in (0, 1, 7, 16, 33, 64, 65, 300):
        attended, residual = (normal(rows, width, dtype=dtype) for width in (wanted.attended, wanted.hidden))
        there = here(attended.clone())
        found, total = op.run(there, here(residual.clone()), ours)
        expected, expected_total = formula(wanted, attended, residual, given, norms, last)
        near(found, expected, dtype, 3)
        near(total, expected_total, dtype, 2)
        assert torch.equal(there.cpu(), attended)
        assert found.dtype == total.dtype == attended.dtype
    if not ON_GPU:
        assert theirs.run(attended, residual, packed(theirs, given, torch.clone))[0].shape == found.shape
    if last:
        return
    residual = normal(7, wanted.hidden, dtype=dtype)
    there = here(residual.clone())
    first = op.first(there, here(norms[1]), ours.next_qkv)
    weights, bias = given["qkv"]
    expected = normed(residual.double(), norms[1].double()) @ torch.cat(weights).double().T
    near(first, expected + (0 if bias is None else bias.double()), dtype, 2)
    assert torch.equal(there.cpu(), residual)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": "float16", "weight_dtype": "float16"}, "dtype float16"),
        ({"dtype": "float32"}, "dtype float32"),
        ({"weight_dtype": "fp8:e4m3:128x128"}, "plain weights, not fp8:e4m3:128x128"),
        ({"hidden": 70000}, "hidden 70000"),
    ],
)
def test_what_it_refuses(changes: dict[str, Any], says: str) -> None:
    wanted = request(**({"dtype": "bfloat16"} | changes))
    assert eligible(wanted) == []
    (provider,) = (p for p in deepinfer_fused(INFO) if p.op == wanted.op)
    assert says in provider.supports(on_cuda(wanted)).reason


def test_it_promises_no_bits() -> None:
    assert [p.name for p in eligible(request("bfloat16"))] == ["between_attention"]
    assert eligible(request("bfloat16", demands=frozenset({"batch_invariant"}))) == []


def test_rows_that_were_not_measured_together_keep_their_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 16 rows tiles of the products alone serve; the table's section has its say first."""
    op = BetweenAttention(on_cuda(request("bfloat16")), context())
    assert sorted(op.tiles) == list(range(1, ROWS_ALONE + 1))
    monkeypatch.setattr(tables, "architecture", lambda device: "sm_90")
    qwen3 = BetweenAttention(on_cuda(request("bfloat16", **QWEN3)), context())
    assert {1, 16, 33, 64} <= set(qwen3.tiles)
    numbers = {part: tables.numbers_of(tile) for part, tile in qwen3.tiles[64].items()}
    section = tables.measured("sm_90", None, "between_attention")
    assert numbers["attention_out"] == section["2560x4096"][-1][1]
    assert numbers["gate_up"] == section["19456x2560"][-1][1]
