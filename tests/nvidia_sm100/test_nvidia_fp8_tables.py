"""Tuned answers for weights in FP8: tables, what is tried, and the shapes that a plan holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from deepinfer_nvidia_sm100 import fp8_tables, fp8_tuning, table_file, tables, tuning
from deepinfer_nvidia_sm100.command import fp8_shapes_of, shapes_of
from deepinfer_nvidia_sm100.ops import fp8_hopper
from deepinfer_nvidia_sm100.ops.few_rows import Tile
from deepinfer_nvidia_sm100.ops.fp8_hopper import HopperTile
from deepinfer_nvidia_sm100.ops.fp8_linear import MANY as MANY_THUMB
from deepinfer_nvidia_sm100.ops.fp8_linear import PLAIN_FEW, ROUNDED_FEW, Fp8Linear, RoundedFp8Linear
from deepinfer_nvidia_sm100.ops.fp8_many_rows import ManyTile
from deepinfer_nvidia_sm100.settings import Settings
from gpu_support import context
from test_nvidia_fp8_linear import ROUNDED, check, inputs, request, rounded, weights

from deepinfer_core.api import ConfigError

FEW = Tile(block_n=64, block_m=16, block_k=128, splits=2, stages=4, warps=4)
MANY = ManyTile(block_m=64, block_n=64, halves=1, stages=2, warps=4)
KINDS: tuple[fp8_tables.Kind, ...] = ("plain", "rounded")


def test_the_packages_answers_fit_the_chip() -> None:
    found = 0
    for file in tables.FOLDER.glob("*.json"):
        for kind in KINDS:
            for shape, rows in tables.measured(file.stem, None, f"fp8_{kind}").items():
                assert all(int(size) for size in shape.split("x"))
                assert [most for most, _ in rows] == sorted({most for most, _ in rows})
                for most, answer in rows:
                    found += 1
                    tile = fp8_tables.decoded(answer)
                    assert fp8_tables.encoded(tile) == answer
                    if isinstance(tile, ManyTile):
                        assert kind == "rounded"
                        assert 128 % tile.block_n == 0
                        assert tile.shared_bytes <= 227 * 1024
                    elif isinstance(tile, HopperTile):
                        assert (kind, file.stem) == ("rounded", "sm_90")
                        assert tile.block_m in (128, 192, 256)
                        assert tile.block_n in (64, 128)
                        assert tile.shared_bytes + 1024 <= 227 * 1024  # and barriers
                    elif tile is None:
                        assert kind == "plain"
                    else:
                        assert tile.block_k in (64, 128, 256)
                        assert tile.block_m >= most or tile.block_m >= 64
    assert found


def test_a_users_answers_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = str(tmp_path / "own.json")
    tuning.save(Path(own), {"200x384": [[4, ["few", *tables.numbers_of(FEW)]], [99, None]]}, "fp8_plain")
    tuning.save(Path(own), {"200x384": [[4, None], [99, ["many", *attrs.astuple(MANY)]]]}, "fp8_rounded")
    tuning.save(Path(own), {"7x8": [[64, None]]})
    assert set(json.loads(Path(own).read_text())) == {"linear", "fp8_plain", "fp8_rounded"}
    monkeypatch.setattr(tables, "architecture", lambda device: "sm_90")
    device = torch.device("cpu")
    assert fp8_tables.fp8_tile("plain", device, 200, 384, 3, own) == FEW
    assert fp8_tables.fp8_tile("plain", device, 200, 384, 5, own) is None
    assert fp8_tables.fp8_tile("plain", device, 200, 384, 100, own) == "thumb"
    assert fp8_tables.fp8_tile("rounded", device, 200, 384, 5, own) == MANY
    assert fp8_tables.fp8_tile("rounded", device, 200, 384, 5) == "thumb"
    settings = attrs.evolve(context(), settings=Settings(table=own))
    plain = Fp8Linear(request(200, 384, "bfloat16"), settings)
    assert plain._tile(4) == FEW
    assert plain._tile(5) is None
    assert plain._tile(PLAIN_FEW) is not None  # past the table: the rule of thumb
    packed = plain.prepare(weights((200,), 384)[0])
    other = RoundedFp8Linear(request(200, 384, "bfloat16", ROUNDED), settings)
    assert isinstance(other._tile(4, packed), Tile)  # what cannot be is passed over
    assert other._tile(5, packed) == MANY
    assert isinstance(other._tile(ROUNDED_FEW + 1000, packed), ManyTile | HopperTile)
    assert isinstance(other._tile(5, attrs.evolve(packed, rows=1)), Tile)  # scales of single rows


def test_tiles_for_one_chip_and_compiler_are_passed_over_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, device = str(tmp_path / "own.json"), torch.device("cpu")
    tile = HopperTile(block_m=256, block_n=128, stages=4)
    tuning.save(Path(own), {"200x384": [[999, fp8_tables.encoded(tile)]]}, "fp8_rounded")
    tuning.save(Path(own), {"7x8": [[64, None]]})
    op = RoundedFp8Linear(request(200, 384, "bfloat16", ROUNDED), attrs.evolve(context(), settings=Settings(table=own)))
    packed = op.prepare(weights((200,), 384)[0])
    monkeypatch.setattr(tables, "architecture", lambda device: "sm_100")
    assert isinstance(op._tile(500, packed), ManyTile)
    monkeypatch.setattr(tables, "architecture", lambda device: "sm_90")
    for version, fits in (("3.6.1", True), ("3.7.0", False)):
        monkeypatch.setattr(fp8_hopper.triton, "__version__", version)
        assert fp8_hopper.usable(device) == fits
        assert op._tile(500, packed) == (tile if fits else MANY_THUMB)
        assert isinstance(op._tile(2000, packed), HopperTile if fits else ManyTile)


@pytest.mark.parametrize("text", [None, "{", "[]", "3"])
def test_a_broken_table_of_answers_is_one_line(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "table.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"plugins\.nvidia_sm100\.table=.*deepinfer tune"):
        tables.measured("sm_90", str(path), "fp8_plain")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_tried_fits_the_chip(kind: fp8_tables.Kind) -> None:
    for rows in (1, 16, 17, 64, 128):
        tiles = list(fp8_tuning.few_candidates(kind, rows))
        assert len(tiles) >= 6
        assert all(tile.block_m >= rows and tile.block_k in (128, 256) for tile in tiles)
        assert all(table_file.CHECKS[f"fp8_{kind}"](fp8_tables.encoded(tile)) is None for tile in tiles)
        assert any(fp8_tuning.sensible(tile, 7168, 4096, rows, 132) for tile in tiles)
    for out, inner in ((256, 128), (2048, 512), (32768, 1024)):
        for rows in (1, 64):
            tiles = list(fp8_tuning.few_candidates(kind, rows))
            assert any(fp8_tuning.sensible(tile, out, inner, rows, 132) for tile in tiles)
    assert all(tile.shared_bytes <= 227 * 1024 for tile in (*fp8_tuning.MANY, *fp8_tuning.HOPPER))


def test_neighbouring_rows_of_equal_answer_are_one_entry() -> None:
    measured: list[dict[str, Any]] = [
        {"rows": rows, "answer": answer} for rows, answer in ((8, None), (1, [1]), (2, [1]))
    ]
    assert fp8_tuning.entries(measured) == [[2, [1]], [8, None]]


def test_shapes_in_fp8_are_read_from_a_plan() -> None:
    plain = {
        "in_features": 256,
        "out_features": 100,
        "dtype": "bfloat16",
        "out_dtype": "bfloat16",
        "weight_dtype": "fp8:e4m3:128x128",
        "activations": "",
    }
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"activations": ROUNDED, "out_dtype": "float32"},
        {"weight_dtype": "fp4:e2m1:1x32", "in_features": 512},
        {"dtype": "float32", "in_features": 640},
        {"weight_dtype": "bfloat16", "in_features": 768},
    )
    plan = {"plan": {"choices": [{"op": "gemm.linear", "request": plain | change} for change in changes]}}
    assert fp8_shapes_of(plan) == {
        ("plain", "100x256"): (100, 256, "bfloat16"),
        ("rounded", "100x256"): (100, 256, "float32"),
    }
    assert shapes_of(plan) == ({"100x768": (100, 768, "bfloat16")}, {})


def test_every_answer_computes_the_same() -> None:
    """Tiles of the package's own tables, cut to the interpreter's size, and those that are tried."""
    parts, values = weights((256,), 512)
    x = inputs(33, 512, "float32")
    op = RoundedFp8Linear(request(256, 512, "float32", ROUNDED), context())
    packed = op.prepare(parts)
    expected = rounded(x) @ values.T
    for tile in fp8_tuning.MANY:
        op._tile = lambda rows, weight, tile=tile: tile  # type: ignore[method-assign,misc]
        check(op.run(x.to(packed.data.device), packed), expected, "float32")
