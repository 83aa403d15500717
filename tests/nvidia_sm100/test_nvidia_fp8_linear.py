"""Linear layers with FP8 weights against float64, of rows as they are and of rounded ones."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from deepinfer_nvidia_sm100.ops import few_rows, fp8_few_rows, fp8_many_rows
from deepinfer_nvidia_sm100.ops.few_rows import Tile
from deepinfer_nvidia_sm100.ops.fp8_many_rows import ManyTile
from deepinfer_nvidia_sm100.ops.fp8_weight import pack
from deepinfer_nvidia_sm100.ops.quantise_rows import quantise_rows
from deepinfer_nvidia_sm100.ops.widen_weight import widen
from gpu_support import DEVICE, DTYPES, ON_GPU, eligible, here, operator, same_bits
from reference_support import operator as reference
from toys.seeds import module_seed

from deepinfer_core.api import LinearRequest, QuantiseDequantiseRequest, QuantisedWeight

ROUNDED = "fp8:e4m3:128"
ROWS = (0, 1, 2, 17, 65, 130)
TOLERANCE = {"float32": 2e-5, "bfloat16": 1.6e-2, "float16": 2e-3}
SEED = module_seed(__name__)


def request(out: int, inner: int, dtype: str, activations: str = "", **changes: Any) -> LinearRequest:
    fields = {
        "in_features": inner,
        "out_features": out,
        "dtype": dtype,
        "out_dtype": dtype,
        "weight_dtype": "fp8:e4m3:128x128",
        "activations": activations,
    }
    return LinearRequest(**(fields | changes))


def weights(sizes: tuple[int, ...], inner: int, rows: int = 128) -> tuple[list[QuantisedWeight], torch.Tensor]:
    """Parts with these numbers of rows, and all their values in float64."""
    draw = torch.Generator().manual_seed(SEED + inner + sum(sizes))
    parts, values = [], []
    for size in sizes:
        data = torch.randn(size, inner, generator=draw).mul(4).to(torch.float8_e4m3fn)
        bits = torch.randint(114, 124, (-(-size // rows), inner // 128), generator=draw).to(torch.uint8)
        part = QuantisedWeight(format="fp8:e4m3", data=data, scale=bits.view(torch.float8_e8m0fnu), block=(rows, 128))
        wide = torch.exp2(bits.double() - 127).repeat_interleave(rows, 0)[:size].repeat_interleave(128, 1)
        parts.append(part)
        values.append(data.double() * wide)
    return parts, torch.cat(values)


def inputs(rows: int, inner: int, dtype: str) -> torch.Tensor:
    draw = torch.Generator().manual_seed(SEED + rows)
    spread = torch.rand(rows, inner // 128, 1, generator=draw).mul(6).sub(3).exp()
    return (torch.randn(rows, inner // 128, 128, generator=draw) * spread).view(rows, inner).to(getattr(torch, dtype))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """As the reference rounds, in float64."""
    op = reference(
        QuantiseDequantiseRequest(format="fp8:e4m3", width=x.shape[1], channels=x.shape[1], group=128, dtype="float32")
    )
    return op.run(x.float()).double()


def check(found: torch.Tensor, expected: torch.Tensor, dtype: str, activations: str = ROUNDED) -> None:
    """Relative to the largest result of a row. The matrix unit adds products of FP8 with some 14 bits."""
    tolerance = max(TOLERANCE[dtype], 2e-3) if activations and ON_GPU else TOLERANCE[dtype]
    scale = expected.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    assert not found.isnan().any()
    worst = ((found.cpu().double() - expected) / scale).abs()
    assert not worst.numel() or float(worst.max()) <= tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(200,), (128, 72), (30, 100, 70)], ids=str)
@pytest.mark.parametrize("activations", ["", ROUNDED])
def test_every_number_of_rows(activations: str, sizes: tuple[int, ...], dtype: str) -> None:
    """Merged parts too, ending within a block or not, with a bias."""
    inner = 384
    wanted = request(sum(sizes), inner, dtype, activations, bias=True)
    op = operator(wanted)
    parts, values = weights(sizes, inner)
    bias = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(SEED)).to(getattr(torch, dtype))
    packed = op.prepare([attrs.evolve(p, data=here(p.data)) for p in parts], here(bias))
    for rows in ROWS:
        x = inputs(rows, inner, dtype)
        found = op.run(here(x), packed)
        assert found.dtype == x.dtype
        assert found.shape == (rows, sum(sizes))
        check(found, (rounded(x) if activations else x.double()) @ values.T + bias.double(), dtype, activations)


@pytest.mark.parametrize("activations", ["", ROUNDED])
def test_results_in_float32(activations: str) -> None:
    op = operator(request(136, 256, DTYPES[-1], activations, out_dtype="float32"))
    parts, values = weights((136,), 256)
    for rows in (1, 20, 140):
        x = inputs(rows, 256, DTYPES[-1])
        found = op.run(here(x), op.prepare(parts))
        assert found.dtype == torch.float32
        check(found, (rounded(x) if activations else x.double()) @ values.T, "float32", activations)


@pytest.mark.parametrize("activations", ["", ROUNDED])
def test_rows_of_more_elements_than_32_bits_count_are_multiplied_in_pieces(
    activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under ``batch_invariant`` all rows of a step are by one tile; here four rows are too many."""
    wanted = attrs.evolve(request(136, 256, DTYPES[-1], activations), demands=frozenset({"batch_invariant"}))
    op, (parts, values) = operator(wanted), weights((136,), 256)
    packed, x = op.prepare(parts), inputs(10, 256, DTYPES[-1])
    whole = op.run(here(x), packed)
    monkeypatch.setattr(few_rows, "COUNTED", 3 * 256)
    found = op.run(here(x), packed)
    check(found, (rounded(x) if activations else x.double()) @ values.T, DTYPES[-1], activations)
    same_bits(found, whole)


def test_rows_are_rounded_as_the_reference_rounds() -> None:
    """Bit by bit, tiny groups, zeros, ties and NaN included."""
    x = inputs(37, 512, DTYPES[-1])
    x[3] = 0
    x[4] *= 1e-9
    x[5, 200] = float("nan")
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    x[6, :126] = ((codes[1:] + codes[:-1]) / 2).to(x.dtype)
    x[6, 126:128] = 448
    data, scale = quantise_rows(here(x))
    assert scale.stride(0) % 4 == 0
    found = data.cpu().float().view(37, 4, 128) * scale.cpu().t()[:, :, None]
    expected = rounded(x).float()
    assert torch.equal(found.view(37, 512).nan_to_num(nan=7e7), expected.nan_to_num(nan=7e7))
    assert bool(found[5, 1].isnan().all())
    assert not found[5, 0].isnan().any()


@pytest.mark.parametrize("rows", [32, 128])
def test_a_weight_is_widened_exactly(rows: int) -> None:
    parts, values = weights((200,), 256, rows)
    packed = pack(request(200, 256, "float32", weight_dtype=f"fp8:e4m3:{rows}x128"), DEVICE, parts, None)
    assert torch.equal(widen(packed, torch.float32).cpu().double(), values)


def test_scales_at_the_ends_of_their_range() -> None:
    data = torch.ones(4, 128).to(torch.float8_e4m3fn)
    bits = torch.tensor([[0], [1], [254], [255]], dtype=torch.uint8)
    part = QuantisedWeight(format="fp8:e4m3", data=data, scale=bits.view(torch.float8_e8m0fnu), block=(1, 128))
    scale = pack(request(4, 128, "float32", weight_dtype="fp8:e4m3:1x128"), DEVICE, [part], None).scale.cpu()
    assert scale[:3, 0].tolist() == [2.0**-127, 2.0**-126, 2.0**127]
    assert bool(scale[3].isnan())


MANY = [
    ManyTile(block_m=64, block_n=64, halves=1, stages=2, warps=4),
    ManyTile(block_m=64, block_n=32, halves=2, stages=2, warps=4),
    ManyTile(block_m=128, block_n=128, halves=1, stages=4, warps=8, box=True, prefetch=False),
]


@pytest.mark.parametrize("tile", MANY, ids=str)
@pytest.mark.parametrize(("rows", "out", "inner"), [(5, 40, 128), (130, 200, 384), (64, 128, 256)])
def test_tiles_of_many_rows(rows: int, out: int, inner: int, tile: ManyTile) -> None:
    parts, values = weights((out,), inner)
    packed = pack(request(out, inner, "float32"), DEVICE, parts, None)
    x = inputs(rows, inner, DTYPES[-1])
    data, scale = quantise_rows(here(x))
    found = torch.full((rows, out), float("nan"), device=DEVICE)
    fp8_many_rows.launch(data, scale, packed.data, packed.scale, packed.rows, None, found, tile)
    check(found, rounded(x) @ values.T, "float32")


@pytest.mark.parametrize("activations", ["", ROUNDED])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("inner", "block_k", "described"),
    [(896, 128, False), (1024, 256, False), (896, 256, False), (1024, 256, True), (896, 128, True)],
)
def test_parts_of_a_long_product_are_added(
    inner: int, block_k: int, described: bool, splits: int, activations: str
) -> None:
    """Also with two blocks in a turn of the loop, where their number is even, and brought by tensor descriptors."""
    parts, values = weights((100,), inner)
    packed = pack(request(100, inner, "float32"), DEVICE, parts, None)
    x = inputs(5, inner, DTYPES[-1])
    data, scale = quantise_rows(here(x)) if activations else (here(x), None)
    arrived = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    tile = Tile(block_n=32, block_m=16, block_k=block_k, splits=splits, stages=2, warps=4, described=described)
    results = []
    for _ in range(3):
        found = torch.full((5, 100), float("nan"), device=DEVICE)
        fp8_few_rows.launch(data, scale, packed.data, packed.scale, packed.rows, None, found, tile, arrived)
        check(found, (rounded(x) if activations else x.double()) @ values.T, "float32", activations)
        results.append(found)
    assert all(torch.equal(results[0], other) for other in results)
    assert not arrived.any()


@pytest.mark.parametrize("activations", ["", ROUNDED])
def test_a_row_has_the_same_bits_among_any_number_of_rows(activations: str) -> None:
    op = operator(request(96, 640, DTYPES[-1], activations, demands=frozenset({"batch_invariant"})))
    parts, _ = weights((96,), 640)
    packed = op.prepare(parts)
    x = here(inputs(130, 640, DTYPES[-1]) * 0.02)
    whole = op.run(x, packed)
    for first, last in ((0, 1), (7, 9), (60, 130), (129, 130)):
        same_bits(op.run(x[first:last].clone(), packed), whole[first:last])


def test_weights_that_do_not_fit_the_request_are_refused() -> None:
    op = operator(request(200, 256, DTYPES[-1]))
    parts, values = weights((200,), 256)
    with pytest.raises(ValueError, match=r"\(200, 256\)"):
        op.prepare(weights((100,), 256)[0])
    with pytest.raises(ValueError, match="scale of shape"):
        op.prepare([attrs.evolve(parts[0], scale=parts[0].scale[:1])])
    with pytest.raises(TypeError, match="scales are"):
        op.prepare([attrs.evolve(parts[0], scale=parts[0].scale.view(torch.uint8))])
    with pytest.raises(ValueError, match="FP8 linear"):
        op.prepare([values])


def test_which_requests_are_taken() -> None:
    def names(**changes: Any) -> list[str]:
        found = eligible(request(256, 256, "bfloat16", **changes))
        return [p.name for p in found if p.name != "deep_gemm_linear"]  # where it is installed

    assert names() == ["fp8_linear"]
    assert names(activations=ROUNDED) == ["rounded_fp8_linear"]
    assert names(weight_dtype="fp8:e4m3:32x128") == ["fp8_linear"]
    for refused in (
        {"weight_dtype": "fp8:e4m3:32x32"},
        {"weight_dtype": "fp4:e2m1:1x32"},
        {"in_features": 192},
        {"activations": "fp8:e4m3:32"},
        {"out_dtype": "float16"},
    ):
        assert not names(**refused), refused
