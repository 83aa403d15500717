"""Products of few rows whose weight is held in registers, with the matrix unit and without, against float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from deepinfer_nvidia_sm100 import table_file, tables, warmup
from deepinfer_nvidia_sm100.ops.few_rows import Tile, launch
from deepinfer_nvidia_sm100.ops.fixed_gated import FixedOrderGatedLinear
from deepinfer_nvidia_sm100.ops.fixed_linear import FixedOrderLinear
from deepinfer_nvidia_sm100.ops.held_rows import MOST, HeldTile, unit_rows
from deepinfer_nvidia_sm100.ops.linear import Linear
from deepinfer_nvidia_sm100.ops.normed_rows import Add, Scale
from deepinfer_nvidia_sm100.ops.one_row import OneRowTile
from deepinfer_nvidia_sm100.settings import Settings
from deepinfer_nvidia_sm100.tuning import register_candidates, save
from gpu_support import DEVICE, ON_GPU, context, here

from deepinfer_core.api import GatedLinearRequest, LinearRequest

DTYPES = ("bfloat16", "float16") if ON_GPU else ("float32",)
"""On a GPU these tiles are for 16 bits."""
TOLERANCE = {"float32": 2e-5, "bfloat16": 1.6e-2, "float16": 2e-3}
EPS = 1e-5


def held(block_n: int = 8, warps: int = 2, held: int = 3, splits: int = 1, ahead: int = 2) -> HeldTile:
    return HeldTile(block_n=block_n, warps=warps, held=held, splits=splits, ahead=ahead)


def one(block_n: int = 2, block_k: int = 128, splits: int = 1, warps: int = 2) -> OneRowTile:
    return OneRowTile(block_n=block_n, block_k=block_k, splits=splits, warps=warps)


HELD = [held(), held(warps=4, held=20), held(16, held=1, ahead=1), held(splits=3), held(warps=1, splits=2)]
ONE = [one(), one(4, 256, 2), one(8, 64, 1, 4), one(2, 512, 3)]
ROWS_AND_TILES = [(rows, tile) for rows in (1, 3, 7, 16) for tile in HELD] + [(1, tile) for tile in ONE]


def normal(*shape: int, dtype: str, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(getattr(torch, dtype))


def near(found: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.cpu().double(), expected.cpu().double(), rtol=tolerance, atol=tolerance)


def counters() -> torch.Tensor:
    return torch.zeros(64, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "chosen"), ROWS_AND_TILES, ids=str)
def test_every_number_of_rows(rows: int, chosen: HeldTile | OneRowTile, dtype: str) -> None:
    """Even sizes, and columns and inner elements that end within a tile; rows that lie apart; again with the same bits.

    K of 320 ends within the last piece of three splits; 344 within a piece of all.
    """
    for out, inner in ((16, 320), (13, 344)):
        wide, weight = normal(rows, inner, dtype=dtype), normal(out, inner, dtype=dtype, scale=inner**-0.5)
        bias = normal(out, dtype=dtype)
        x = torch.cat((wide, torch.full((rows, 8), float("nan"), dtype=wide.dtype)), 1)
        arrived = counters()
        for shift in (None, bias):
            expected = wide.double() @ weight.double().T + (0 if shift is None else shift.double())
            results = []
            for _ in range(1 if shift is None else 2):
                found = torch.full((rows + 1, out), float("nan"), dtype=x.dtype, device=DEVICE)
                moved = None if shift is None else here(shift)
                launch(here(x)[:, :inner], here(weight), moved, found[:rows], chosen, arrived)
                near(found[:rows], expected, dtype)
                assert bool(found[rows].isnan().all())
                results.append(found[:rows])
            assert torch.equal(results[0], results[-1])
        assert not arrived.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("chosen", [*HELD, *ONE], ids=str)
def test_a_gate_at_the_end(chosen: HeldTile | OneRowTile, limit: float | None, dtype: str) -> None:
    rows, width, inner = 1 if isinstance(chosen, OneRowTile) else 3, 22, 352
    x, weight = normal(rows, inner, dtype=dtype), normal(2 * width, inner, dtype=dtype, scale=inner**-0.5)
    found = torch.full((rows, width), float("nan"), dtype=x.dtype, device=DEVICE)
    arrived = counters()
    launch(here(x), here(weight), None, found, chosen, arrived, gated=True, limit=limit)
    gate, up = (x.double() @ weight.double().T).chunk(2, 1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    near(found, torch.nn.functional.silu(gate) * up, dtype)
    assert not arrived.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("chosen", [*HELD, *ONE], ids=str)
def test_a_norm_at_the_ends_of_two_products(chosen: HeldTile | OneRowTile, gated: bool, dtype: str) -> None:
    """The first adds to the residual and tells its squares, the second scales what it finds: as with a norm between."""
    rows, hidden, inner, out = 1 if isinstance(chosen, OneRowTile) else 5, 72, 328, 44
    x, first = normal(rows, inner, dtype=dtype), normal(hidden, inner, dtype=dtype, scale=inner**-0.5)
    second, norm = normal(out, hidden, dtype=dtype, scale=hidden**-0.5), normal(hidden, dtype=dtype)
    before, shift = normal(rows, hidden, dtype=dtype), normal(out, dtype=dtype)
    parts = -(-hidden // chosen.block_n)
    residual, sums = here(before.clone()), torch.full((rows, hidden), float("nan"), dtype=x.dtype, device=DEVICE)
    squares, arrived = torch.full((parts, rows), float("nan"), device=DEVICE), counters()
    launch(here(x), here(first), None, sums, chosen, arrived, add=Add(residual, here(norm), squares))
    near(residual, before.double() + x.double() @ first.double().T, dtype)
    total = residual.cpu().double()
    near(sums, total * norm.double(), dtype)
    near(squares.sum(0), total.square().sum(1), "float32")
    found = torch.full((rows, out // 2 if gated else out), float("nan"), dtype=x.dtype, device=DEVICE)
    launch(sums, here(second), here(shift), found, chosen, arrived, gated=gated, scale=Scale(squares, parts, EPS))
    size = torch.rsqrt(total.square().mean(1, keepdim=True) + EPS)
    expected = sums.cpu().double() @ second.double().T * size + shift.double()
    if gated:
        gate, up = expected.chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * up
    near(found, expected, dtype)
    assert not arrived.any()


def request(out: int, inner: int, dtype: str, **changes: Any) -> LinearRequest:
    fields = {"in_features": inner, "out_features": out, "dtype": dtype, "out_dtype": dtype, "weight_dtype": dtype}
    return LinearRequest(**(fields | changes))


def test_a_table_chooses_them_for_the_rows_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits, and there are as many counters as the smallest of their tiles need."""
    single, some = one(splits=2), held(splits=2)
    assert tables.numbers_of(single) == ["one", 2, 128, 2, 2]
    assert tables.numbers_of(some) == ["held", 8, 2, 3, 2, 2, 0]
    own = tmp_path / "own.json"
    entries = [[1, tables.numbers_of(single)], [2, tables.numbers_of(some)], [16, [64, 16, 128, 1, 4, 4]]]
    save(own, {"72x256": entries})
    monkeypatch.setattr(tables, "architecture", lambda device: "sm_90")
    settings = attrs.evolve(context(), settings=Settings(table=str(own)))
    op = Linear(request(72, 256, "bfloat16"), settings)
    assert [op._tiles[rows] for rows in (1, 2)] == [single, some]
    assert isinstance(op._tiles[3], Tile)
    assert op.arrived.numel() >= 72 // single.block_n
    plain = Linear(request(72, 256, "float32"), settings)
    assert not plain._tiles
    op = op if ON_GPU else plain
    op._tiles = {1: single, 2: some}
    dtype = "bfloat16" if ON_GPU else "float32"
    weight = normal(72, 256, dtype=dtype, scale=1 / 16)
    packed = op.prepare([here(weight)])
    for rows in (1, 2):
        x = normal(rows, 256, dtype=dtype)
        near(op.run(here(x), packed), x.double() @ weight.double().T, dtype)


@pytest.mark.parametrize(
    ("section", "most", "answer", "wrong"),
    [
        ("linear", 17, ["held", 8, 4, 20, 1, 3, 128], "such tiles are for 16 rows at most"),
        ("linear", 2, ["one", 2, 512, 1, 2], "such tiles are for 1 rows at most"),
        ("linear", 1, ["one", 2, 512, 1], 'expected ["one", block_n, block_k, splits, warps]'),
        ("between_attention", 1, ["one", 1, 512, 1, 2], "block_n 1: expected a power of two from 2 to 16"),
        ("linear", 1, ["held", 8, 4, 20, 1, 3], 'expected ["held", block_n, warps, held, splits, ahead, registers]'),
        ("gated_linear", 1, ["held", 64, 4, 20, 1, 3, 128], "block_n 64: expected a power of two from 8 to 16"),
        ("between_attention", 1, ["held", 8, 4, 0, 1, 3, 128], "held 0: expected a number from 1 on"),
        ("linear", 1, ["held", 8, 4, 1, 1, 3, 300], "registers 300: expected 24 to 255, or 0"),
        ("linear", 1, ["held", 8, 3, 1, 1, 3, 0], "warps 3: expected one of 1, 2, 4, 8, 16"),
        ("fixed_linear", 1, ["held", 8, 4, 20, 1, 3, 128], "expected [block_n"),
        ("fixed_gated_linear", 1, ["one", 2, 512, 1, 2], "expected [block_n"),
    ],
)
def test_a_table_says_what_cannot_be(tmp_path: Path, section: str, most: int, answer: Any, wrong: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"linear": {}, section: {"6144x2560": [[most, answer]]}}))
    with pytest.raises(table_file.BadTable) as error:
        table_file.read(str(path))
    assert wrong in str(error.value)


def test_products_that_keep_a_rows_bits_do_not_take_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sections they read have none: sums there have an order that no other number of rows has."""
    own = tmp_path / "own.json"
    for section in ("linear", "gated_linear", "between_attention"):
        save(own, {"144x256": [[1, tables.numbers_of(one())], [16, tables.numbers_of(held())]]}, section)
    monkeypatch.setattr(tables, "architecture", lambda device: "sm_90")
    settings = attrs.evolve(context(), settings=Settings(table=str(own)))
    demands = frozenset({"batch_invariant"})
    gated = GatedLinearRequest(in_features=256, width=72, dtype="bfloat16", weight_dtype="bfloat16", demands=demands)
    for op in (
        FixedOrderLinear(request(144, 256, "bfloat16", demands=demands), settings),
        FixedOrderGatedLinear(gated, settings),
    ):
        assert {type(tile) for tile in op._tiles.values()} <= {Tile, type(None)}
        assert isinstance(op._tiles[1], Tile)
    assert isinstance(Linear(request(144, 256, "bfloat16"), settings)._tiles[1], OneRowTile)


@pytest.mark.parametrize("inner", [2560, 4096, 9728, 640])
def test_candidates_can_be_in_a_table(inner: int) -> None:
    assert not list(register_candidates(MOST + 1, inner))
    alone, together = list(register_candidates(1, inner)), list(register_candidates(MOST, inner))
    assert any(isinstance(tile, OneRowTile) for tile in alone) == (inner > 640)
    assert together == [tile for tile in alone if isinstance(tile, HeldTile)] != []
    assert all(tile.held <= tile.pieces(inner) for tile in together if isinstance(tile, HeldTile))
    for tile in alone:
        numbers = tables.numbers_of(tile)
        assert table_file.CHECKS["between_attention"](numbers) is None
        assert tables.any_tile_of(numbers) == tile


def test_warm_up_has_steps_for_every_kernel_of_them() -> None:
    """Numbers of rows share kernels; the warm-up runs one of each kind."""
    kinds = {unit_rows(rows) for rows in range(1, MOST + 1)}
    assert {unit_rows(rows) for rows in warmup.ROWS if rows <= MOST} == kinds
    assert 1 in warmup.ROWS
