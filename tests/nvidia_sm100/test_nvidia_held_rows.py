"""Products of up to sixteen rows with the weight straight in registers, against float64, whatever is cut how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from deepinfer_nvidia_sm100 import table_file, tables
from deepinfer_nvidia_sm100.ops.few_rows import Tile, launch
from deepinfer_nvidia_sm100.ops.fixed_gated import FixedOrderGatedLinear
from deepinfer_nvidia_sm100.ops.fixed_linear import FixedOrderLinear
from deepinfer_nvidia_sm100.ops.held_rows import MOST, HeldTile
from deepinfer_nvidia_sm100.ops.linear import Linear
from deepinfer_nvidia_sm100.settings import Settings
from deepinfer_nvidia_sm100.tuning import held_candidates, save
from gpu_support import DEVICE, ON_GPU, context, here

from deepinfer_core.api import GatedLinearRequest, LinearRequest

DTYPES = ("bfloat16", "float16") if ON_GPU else ("float32",)
"""On a GPU these tiles are for 16 bits."""
TOLERANCE = {"float32": 2e-5, "bfloat16": 1.6e-2, "float16": 2e-3}


def tile(block_n: int = 8, warps: int = 2, held: int = 3, splits: int = 1, ahead: int = 2) -> HeldTile:
    return HeldTile(block_n=block_n, warps=warps, held=held, splits=splits, ahead=ahead)


TILES = [tile(), tile(warps=4, held=20), tile(block_n=16, held=1, ahead=1), tile(splits=3), tile(warps=1, splits=2)]


def normal(*shape: int, dtype: str, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chosen", TILES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 4, 7, 16])
def test_every_number_of_rows(rows: int, chosen: HeldTile, dtype: str) -> None:
    """Even sizes, and columns and inner elements that end within a tile; rows that lie apart; again with the same bits.

    K of 320 ends within the last piece of three splits; 344 within a piece of all.
    """
    for out, inner in ((24, 320), (21, 344)):
        wide, weight = normal(rows, inner, dtype=dtype), normal(out, inner, dtype=dtype, scale=inner**-0.5)
        bias = normal(out, dtype=dtype)
        x = torch.cat((wide, torch.full((rows, 8), float("nan"), dtype=wide.dtype)), 1)
        arrived = torch.zeros(8, dtype=torch.int32, device=DEVICE)
        for shift in (None, bias):
            expected = wide.double() @ weight.double().T + (0 if shift is None else shift.double())
            results = []
            for _ in range(2):
                found = torch.full((rows + 1, out), float("nan"), dtype=x.dtype, device=DEVICE)
                bent = None if shift is None else here(shift)
                launch(here(x)[:, :inner], here(weight), bent, found[:rows], chosen, arrived)
                torch.testing.assert_close(
                    found[:rows].cpu().double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
                )
                assert bool(found[rows].isnan().all())
                results.append(found[:rows])
            assert torch.equal(*results)
        assert not arrived.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("chosen", TILES, ids=str)
def test_a_gate_at_the_end(chosen: HeldTile, limit: float | None, dtype: str) -> None:
    rows, width, inner = 3, 22, 352
    x, weight = normal(rows, inner, dtype=dtype), normal(2 * width, inner, dtype=dtype, scale=inner**-0.5)
    found = torch.full((rows, width), float("nan"), dtype=x.dtype, device=DEVICE)
    arrived = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    launch(here(x), here(weight), None, found, chosen, arrived, gated=True, limit=limit)
    gate, up = (x.double() @ weight.double().T).chunk(2, 1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(found.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert not arrived.any()


def request(out: int, inner: int, dtype: str, **changes: Any) -> LinearRequest:
    fields = {"in_features": inner, "out_features": out, "dtype": dtype, "out_dtype": dtype, "weight_dtype": dtype}
    return LinearRequest(**(fields | changes))


def test_a_table_chooses_it_for_the_rows_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits; what the operator then launches is right, with as many counters as there are tiles."""
    dtype, chosen = DTYPES[0] if ON_GPU else "bfloat16", tile(splits=2)
    numbers = tables.numbers_of(chosen)
    assert numbers == ["held", 8, 2, 3, 2, 2, 0]
    own = tmp_path / "own.json"
    save(own, {"72x256": [[2, numbers], [16, [64, 16, 128, 1, 4, 4]]]})
    monkeypatch.setattr(tables, "architecture", lambda device: "sm_90")
    settings = attrs.evolve(context(), settings=Settings(table=str(own)))
    op = Linear(request(72, 256, dtype), settings)
    assert op._tiles[1] == op._tiles[2] == chosen
    assert isinstance(op._tiles[3], Tile)
    assert op.arrived.numel() >= 72 // 8
    single = Linear(request(72, 256, "float32"), settings)
    assert not single._tiles
    single._tiles = {2: chosen}
    x, weight = normal(2, 256, dtype="float32"), normal(72, 256, dtype="float32")
    if not ON_GPU:
        found = single.run(x, single.prepare([weight]))
        torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("section", "most", "answer", "wrong"),
    [
        ("linear", 17, ["held", 8, 4, 20, 1, 3, 128], "such tiles are for 16 rows at most"),
        ("linear", 1, ["held", 8, 4, 20, 1, 3], 'expected ["held", block_n, warps, held, splits, ahead, registers]'),
        ("gated_linear", 1, ["held", 64, 4, 20, 1, 3, 128], "block_n 64: expected a power of two from 8 to 16"),
        ("between_attention", 1, ["held", 8, 4, 0, 1, 3, 128], "held 0: expected a number from 1 on"),
        ("linear", 1, ["held", 8, 4, 1, 1, 3, 300], "registers 300: expected 24 to 255, or 0"),
        ("linear", 1, ["held", 8, 3, 1, 1, 3, 0], "warps 3: expected one of 1, 2, 4, 8, 16"),
        ("fixed_linear", 1, ["held", 8, 4, 20, 1, 3, 128], "block_n"),
        ("fixed_gated_linear", 1, ["held", 8, 4, 20, 1, 3, 128], "block_n"),
    ],
)
def test_a_table_says_what_cannot_be(tmp_path: Path, section: str, most: int, answer: Any, wrong: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"linear": {}, section: {"6144x2560": [[most, answer]]}}))
    with pytest.raises(table_file.BadTable) as error:
        table_file.read(str(path))
    assert wrong in str(error.value)


def test_products_that_keep_a_rows_bits_do_not_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sections they read have none: its sums have another order, and other numbers of rows other kernels."""
    own = tmp_path / "own.json"
    for section in ("linear", "gated_linear", "between_attention"):
        save(own, {"144x256": [[16, tables.numbers_of(tile())]]}, section)
    monkeypatch.setattr(tables, "architecture", lambda device: "sm_90")
    settings = attrs.evolve(context(), settings=Settings(table=str(own)))
    fixed = frozenset({"batch_invariant"})
    plain = FixedOrderLinear(request(144, 256, "bfloat16", demands=fixed), settings)
    gate = FixedOrderGatedLinear(
        GatedLinearRequest(in_features=256, width=72, dtype="bfloat16", weight_dtype="bfloat16", demands=fixed),
        settings,
    )
    for op in (plain, gate):
        assert op._tiles
        assert not any(isinstance(chosen, HeldTile) for chosen in op._tiles.values())


@pytest.mark.parametrize("inner", [2560, 4096, 9728, 300])
def test_candidates_hold_what_they_need(inner: int) -> None:
    assert not list(held_candidates(MOST + 1, inner))
    found = list(held_candidates(MOST, inner))
    assert found
    for chosen in found:
        assert chosen.held <= chosen.pieces(inner)
        assert table_file.CHECKS["linear"](tables.numbers_of(chosen)) is None
        assert tables.any_tile_of(tables.numbers_of(chosen)) == chosen
