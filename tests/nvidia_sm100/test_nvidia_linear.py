"""Linear layers against float64, for every number of rows that changes the way they are computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepinfer_nvidia_sm100.ops import few_rows
from deepinfer_nvidia_sm100.ops.described_rows import describable
from deepinfer_nvidia_sm100.ops.few_rows import Tile, launch
from deepinfer_nvidia_sm100.ops.linear import thumb
from gpu_support import DEVICE, DTYPES, here, operator, same_bits

from deepinfer_core.api import LinearRequest

ROWS = (0, 1, 2, 17, 33, 64, 65, 130)
TOLERANCE = {"float32": 2e-5, "bfloat16": 1.6e-2, "float16": 2e-3}


def tensors(rows: int, out: int, inner: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(rows + out)
    kind = getattr(torch, dtype)
    return (
        torch.randn(rows, inner, generator=made).to(kind),
        (torch.randn(out, inner, generator=made) / inner**0.5).to(kind),
        torch.randn(out, generator=made).to(kind),
    )


def request(out: int, inner: int, dtype: str, **changes: Any) -> LinearRequest:
    fields = {"in_features": inner, "out_features": out, "dtype": dtype, "out_dtype": dtype, "weight_dtype": dtype}
    return LinearRequest(**(fields | changes))


def check(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: str) -> None:
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    torch.testing.assert_close(found.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["linear", "fixed_order_linear"])
def test_every_number_of_rows(name: str, bias: bool, dtype: str) -> None:
    out, inner = 200, 320
    op = operator(request(out, inner, dtype, bias=bias), name)
    for rows in ROWS:
        x, weight, shift = tensors(rows, out, inner, dtype)
        packed = op.prepare([weight[:30], weight[30:]], shift if bias else None)
        found = op.run(here(x), packed)
        assert found.dtype == x.dtype
        check(found, x, weight, shift if bias else None, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_not_rounded_to_the_weights_type(dtype: str) -> None:
    op = operator(request(100, 64, dtype, out_dtype="float32"))
    for rows in (1, 20, 100):
        x, weight, _ = tensors(rows, 100, 64, dtype)
        found = op.run(here(x), op.prepare([weight]))
        assert found.dtype == torch.float32
        check(found, x, weight, None, "float32")


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize(("out", "inner"), [(64, 256), (100, 300)])
def test_parts_of_a_long_product_are_added(splits: int, out: int, inner: int) -> None:
    dtype = DTYPES[-1]
    x, weight, bias = tensors(5, out, inner, dtype)
    arrived = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    tile = Tile(block_n=32, block_m=16, block_k=32, splits=splits, stages=2, warps=4)
    results = []
    for _ in range(3):
        found = torch.full((5, out), float("nan"), dtype=x.dtype, device=DEVICE)
        launch(here(x), here(weight), here(bias), found, tile, arrived)
        check(found, x, weight, bias, dtype)
        results.append(found)
    assert all(torch.equal(results[0], other) for other in results)
    assert not arrived.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("rows", "out", "inner"), [(1, 64, 64), (5, 200, 328), (20, 136, 96)])
def test_tiles_that_descriptors_bring(rows: int, out: int, inner: int, splits: int, dtype: str) -> None:
    """Uneven edges read as zero, of the weight and of the rows, also where the rows lie apart."""
    wide, weight, bias = tensors(rows, out, inner, dtype)
    x = torch.cat((wide, torch.full((rows, 8), float("nan"), dtype=wide.dtype)), 1)
    arrived = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    tile = Tile(block_n=64, block_m=16, block_k=64, splits=splits, stages=2, warps=4, described=True)
    for shift in (None, bias):
        found = torch.full((rows, out), float("nan"), dtype=x.dtype, device=DEVICE)
        launch(here(x)[:, :inner], here(weight), None if shift is None else here(shift), found, tile, arrived)
        check(found, wide, weight, shift, dtype)
    assert not arrived.any()


def test_what_the_copy_engine_cannot_read_is_read_by_threads() -> None:
    """Rows of 36 bytes, in 16 bits: the same tile by the other kernel."""
    x, weight, _ = tensors(3, 64, 18, "bfloat16")
    assert not describable(weight)
    assert describable(tensors(3, 64, 24, "bfloat16")[1])
    if DEVICE.type == "cuda":
        found = torch.full((3, 64), float("nan"), dtype=x.dtype, device=DEVICE)
        tile = Tile(block_n=64, block_m=16, block_k=64, splits=1, stages=2, warps=4, described=True)
        launch(here(x), here(weight), None, found, tile, torch.zeros(64, dtype=torch.int32, device=DEVICE))
        check(found, x, weight, None, "bfloat16")


def test_a_row_has_the_same_bits_among_any_number_of_rows() -> None:
    out, inner = 96, 640
    dtype = DTYPES[-1]
    op = operator(request(out, inner, dtype, demands=frozenset({"batch_invariant"})))
    x, weight, _ = tensors(130, out, inner, dtype)
    packed = op.prepare([weight])
    whole = op.run(here(x), packed)
    for first, last in ((0, 1), (7, 9), (60, 130), (129, 130)):
        same_bits(op.run(here(x)[first:last].clone(), packed), whole[first:last])


@pytest.mark.parametrize("splits", [1, 2])
def test_rows_of_more_elements_than_32_bits_count_are_multiplied_in_pieces(
    splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit itself takes 4 GB and more: here it is less than four rows."""
    x, weight, bias = tensors(23, 40, 256, DTYPES[-1])
    monkeypatch.setattr(few_rows, "COUNTED", 3 * 256 + 186)
    rows: list[int] = []
    plain = few_rows.parts_of
    monkeypatch.setattr(few_rows, "parts_of", lambda x, *more: rows.append(len(x)) or plain(x, *more))
    tile = Tile(block_n=32, block_m=16, block_k=32, splits=splits, stages=2, warps=4)
    arrived = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    found = torch.full((23, 40), float("nan"), dtype=x.dtype, device=DEVICE)
    launch(here(x), here(weight), here(bias), found, tile, arrived)
    check(found, x, weight, bias, DTYPES[-1])
    assert rows == [3] * 7 + [2]
    assert not arrived.any()


@pytest.mark.parametrize("rows", [1, 16, 17, 64])
@pytest.mark.parametrize("shape", [(2560, 9728), (151936, 2560), (100, 77)])
def test_the_rule_of_thumb_fits_the_chip(shape: tuple[int, int], rows: int) -> None:
    tile = thumb(*shape, rows)
    assert tile.block_m >= min(rows, 64)
    assert tile.shared_bytes <= 200_000
