"""Tuned tables: the package's own, a user's, and the command that makes one."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from click.testing import CliRunner
from deepinfer_nvidia_sm100 import between_tuning, fixed_tuning, fp8_tuning, table_file, tables, tuning
from deepinfer_nvidia_sm100.command import shapes_of, tune
from deepinfer_nvidia_sm100.ops.between_attention import BetweenAttention
from deepinfer_nvidia_sm100.ops.few_rows import Tile
from deepinfer_nvidia_sm100.ops.held_rows import HeldTile
from deepinfer_nvidia_sm100.ops.linear import Linear
from deepinfer_nvidia_sm100.ops.one_row import OneRowTile
from deepinfer_nvidia_sm100.settings import Settings
from deepinfer_nvidia_sm100.tuning import candidates, entries, save
from gpu_support import context

from deepinfer_core.api import ConfigError, DeviceError, LinearRequest
from deepinfer_core.config import load_config, plugin_settings

TILE = Tile(block_n=64, block_m=16, block_k=128, splits=2, stages=4, warps=4)
NUMBERS = [64, 16, 128, 2, 4, 4]
GATE = [128, 16, 64, 1, 4, 4, True]


def test_the_packages_tables_hold_tiles_that_fit() -> None:
    files = list(tables.FOLDER.glob("*.json"))
    assert files
    for file, section in itertools.product(files, ("linear", "gated_linear", "between_attention")):
        for shape, rows in tables.measured(file.stem, None, section).items():
            assert [int(n) for n in shape.split("x")]
            assert [most for most, _ in rows] == sorted({most for most, _ in rows})
            for most, numbers in rows:
                if numbers is not None:
                    tile = tables.any_tile_of(numbers)
                    assert tables.numbers_of(tile) == numbers
                    if not isinstance(tile, Tile):
                        inner = int(shape.split("x")[1])
                        assert not isinstance(tile, HeldTile) or tile.held <= tile.pieces(inner)
                        continue
                    assert tile.block_m >= most or tile.block_m == 64
                    assert tile.shared_bytes <= 227 * 1024
                    # What tensor descriptors bring ends in a gate without parts, by whole halves of the matrix unit.
                    assert section != "gated_linear" or not tile.described or (tile.splits == 1 and tile.block_n >= 128)


@pytest.mark.parametrize("flags", [[], [True], [False, True], [True, True]])
def test_a_tile_is_written_as_it_is_read(flags: list[bool]) -> None:
    tile = tables.tile_of([*NUMBERS, *flags])
    assert (tile.described, tile.late) == tuple([*flags, False, False][:2])
    assert tables.numbers_of(tile) == [*NUMBERS, *flags]


def test_a_users_table_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.json"
    save(own, {"100x256": [[4, NUMBERS], [64, None]]})
    save(own, {"7x8": [[64, None]]})
    save(own, {"100x256": [[8, GATE]]}, "gated_linear")
    monkeypatch.setattr(tables, "architecture", lambda device: "sm_90")
    device = torch.device("cpu")
    assert tables.linear_tile(device, 100, 256, 3, str(own)) == TILE
    assert tables.linear_tile(device, 100, 256, 5, str(own)) is None
    assert tables.linear_tile(device, 100, 256, 5, str(own), "gated_linear") == tables.tile_of(GATE)
    assert tables.linear_tile(device, 100, 256, 65, str(own)) == "thumb"
    assert tables.linear_tile(device, 100, 256, 3) == "thumb"
    assert tables.linear_tile(device, 6144, 2560, 1, str(own)) == tables.linear_tile(device, 6144, 2560, 1) != "thumb"
    request = LinearRequest(
        in_features=256, out_features=100, dtype="bfloat16", out_dtype="bfloat16", weight_dtype="bfloat16"
    )
    built = Linear(request, attrs.evolve(context(), settings=Settings(table=str(own))))
    assert built._tiles[4] == TILE
    assert built._tiles[5] is None


@pytest.mark.parametrize("text", [None, "{", "[]", "{}"])
def test_a_broken_table_is_one_line(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "table.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"plugins\.nvidia_sm100\.table=.*deepinfer tune"):
        tables.measured("sm_90", str(path))


@pytest.mark.parametrize(
    ("section", "answer", "wrong"),
    [
        ("linear", [64, 16, 1024, 1, 6, 4], "needs 983,040 bytes of shared memory, and a multiprocessor has 232,448"),
        ("linear", [96, 16, 128, 1, 6, 4], "block_n 96: expected a power of two from 16 to 256"),
        ("linear", [64, 16, 128, 0, 6, 4], "splits 0: expected a number from 1 on"),
        ("linear", [64, 16, 128, 1, 6, 3], "warps 3: expected one of 1, 2, 4, 8, 16"),
        ("linear", [64, 16, 128, 1, 6], "expected [block_n, block_m, block_k, splits, stages, warps]"),
        ("linear", "fast", "expected a list of numbers, or null"),
        ("gated_linear", [*NUMBERS, True], "tensor descriptors end in a gate by one part and 128 columns or more"),
        ("fp8_plain", ["hopper", 256, 128, 4, 8, True], "'hopper': expected 'few' and its numbers"),
        ("fp8_rounded", ["hopper", 64, 128, 4, 8, True], "block_m 64: expected 128, 192 or 256"),
        ("fp8_rounded", ["hopper", 256, 128, 5, 8, True], "needs 278,528 bytes of shared memory"),
        ("fp8_rounded", ["few", 64, 64, 512, 1, 8, 4], "needs 524,288 bytes of shared memory"),
        (
            "fp8_rounded",
            ["many", 128, 128, 3, 4, 8, 8, 1, False, True],
            "halves 3: expected a power of two from 1 to 2",
        ),
    ],
)
def test_a_tile_that_cannot_be_is_an_error_before_anything_is_loaded(
    tmp_path: Path, section: str, answer: Any, wrong: str
) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"linear": {}, section: {"6144x2560": [[1, None], [16, answer]]}}))
    config = load_config(sets=[f"plugins.nvidia_sm100.table={path}"], environ={})
    with pytest.raises(ConfigError) as error:
        plugin_settings(config, "nvidia_sm100", Settings)
    text = str(error.value)
    assert text.startswith("plugins.nvidia_sm100 = ")
    assert f"table {path}: {section} '6144x2560', up to 16 rows" in text
    assert wrong in text
    assert text.endswith("; run deepinfer tune again")
    with pytest.raises(ConfigError, match=r"plugins\.nvidia_sm100\.table="):
        tables.measured("sm_90", str(path))


@pytest.mark.parametrize(
    ("table", "wrong"),
    [
        ({"linear": {}, "gated": {}}, "section 'gated': expected one of linear, gated_linear"),
        ({"linear": {"2560": []}}, "linear '2560': expected a shape such as '6144x2560'"),
        ({"linear": {"8x8": [[16, None], [16, None]]}}, "most rows 16: expected whole numbers in ascending order"),
        ({"linear": {"8x8": [[16]]}}, "expected a list of [most rows, tile]"),
    ],
)
def test_what_is_no_table_says_where(tmp_path: Path, table: Any, wrong: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    with pytest.raises(table_file.BadTable, match=re.escape(wrong) + ".*deepinfer tune"):
        table_file.read(str(path))


def test_the_packages_own_tables_are_tables() -> None:
    for file in tables.FOLDER.glob("*.json"):
        assert table_file.read(str(file)).keys() <= table_file.CHECKS.keys()


def test_neighbours_of_equal_answer_are_one_entry() -> None:
    measured: list[dict[str, Any]] = [{"rows": rows, "tile": tile} for rows, tile in ((8, None), (1, TILE), (2, TILE))]
    assert entries(measured) == [[2, NUMBERS], [8, None]]


@pytest.mark.parametrize("rows", [1, 16, 17, 64])
def test_candidates_hold_the_rows_and_fit(rows: int) -> None:
    found = list(candidates(rows))
    assert len(found) > 20
    assert all(tile.block_m >= rows and tile.shared_bytes <= 220_000 for tile in found)


def row(op: str, **request: Any) -> dict[str, Any]:
    return {"op": op, "request": request}


def test_shapes_are_read_from_a_plan() -> None:
    big = {"in_features": 64, "out_features": 100, "dtype": "bfloat16", "out_dtype": "float32"}
    choices = [row("gemm.linear", **big), row("gemm.linear", **big | {"dtype": "float32"}), row("other")]
    plan = {"plan": {"choices": choices}}
    assert shapes_of(plan) == ({"100x64": (100, 64, "float32")}, {})
    choices.append(row("fused.gated_linear", width=30, in_features=64, dtype="bfloat16"))
    assert shapes_of(plan) == ({"100x64": (100, 64, "float32")}, {"60x64": (60, 64, "bfloat16")})
    sizes = {"hidden": 32, "attended": 48, "width": 40, "merged": 56}
    choices[:] = [row("fused.between_attention", dtype="bfloat16", **sizes)]
    inner = ((32, 48), (80, 32), (32, 40), (56, 32))
    products = {f"{n}x{k}": (n, k, "bfloat16") for n, k in inner}
    assert shapes_of(plan) == (products, {"80x32": (80, 32, "bfloat16")})
    for wrong in ([], {"plan": 3}, {"plan": {"choices": 1}}):
        with pytest.raises(ConfigError, match="deepinfer explain"):
            shapes_of(wrong)


def test_a_plan_without_matrices_to_tune_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"plan": {"choices": []}}))
    result = CliRunner().invoke(tune, [str(tmp_path / "plan.json")])
    assert isinstance(result.exception, ConfigError)
    assert "deepinfer explain" in str(result.exception)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_tuning_without_a_gpu_is_an_error(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    request = {"in_features": 64, "out_features": 100, "dtype": "bfloat16", "out_dtype": "bfloat16"}
    plan.write_text(json.dumps({"plan": {"choices": [row("gemm.linear", **request)]}}))
    result = CliRunner().invoke(tune, [str(plan), "--out", str(tmp_path / "out.json")])
    assert isinstance(result.exception, DeviceError)
    assert not (tmp_path / "out.json").exists()
    plan.write_text("no")
    assert isinstance(CliRunner().invoke(tune, [str(plan)]).exception, ConfigError)


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ([{}], r"plan.choices\[0\] has no op or no request"),
        ([row("gemm.linear", dtype="float32"), "x"], r"plan.choices\[1\] has no op or no request"),
        ([{"op": "gemm.linear", "request": None}], r"plan.choices\[0\] has no op or no request"),
        ([row("gemm.linear", dtype="bfloat16")], "a request of plan.choices has no 'out_features'"),
    ],
)
def test_a_plan_that_lacks_something_says_what(tmp_path: Path, choices: Any, said: str) -> None:
    result = run_tune(tmp_path, choices)
    assert isinstance(result.exception, ConfigError)
    assert re.match(f"PLAN: {said}: expected what this writes: deepinfer explain", str(result.exception))


@pytest.mark.parametrize(
    ("name", "held", "said"),
    [
        ("none/tuned.json", None, "there is no folder"),
        ("tuned.json", "", "no JSON"),
        ("tuned.json", '{"gated_linear": {}}', "no table of tiles"),
        ("tuned.json", '{"linear": {"64x64": [[1, [3, 16, 128, 1, 4, 4]]]}}', "block_n 3: expected a power of two"),
    ],
)
def test_a_file_that_results_cannot_go_to_is_an_error_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, held: str | None, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("deepinfer_nvidia_sm100.command.tune_all", lambda *_: pytest.fail("it was measured"))
    if held is not None:
        (tmp_path / name).write_text(held)
    result = run_tune(tmp_path, [LINEAR], "--out", str(tmp_path / name))
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(f"--out {tmp_path / name}: ")
    assert said in str(result.exception)


BF16 = {"dtype": "bfloat16", "out_dtype": "bfloat16"}
LINEAR = row("gemm.linear", in_features=64, out_features=100, **BF16)
INVARIANT = row("gemm.linear", in_features=64, out_features=100, **BF16, demands=["batch_invariant"])
IN_FP8 = row("gemm.linear", in_features=256, out_features=128, **BF16, weight_dtype="fp8:e4m3:128x128")
GATED = row("fused.gated_linear", width=30, in_features=64, dtype="bfloat16")


def run_tune(path: Path, choices: list[dict[str, Any]], *arguments: str) -> Any:
    """In ``path``, the table being ``tuned.json``; the result has the exit code as ``return_value``."""
    (path / "plan.json").write_text(json.dumps({"plan": {"choices": choices}}))
    given = [str(path / "plan.json"), "--out", str(path / "tuned.json"), *arguments]
    return CliRunner().invoke(tune, given, standalone_mode=False)


@pytest.mark.parametrize(
    ("choices", "asked", "said"),
    [
        ([LINEAR, GATED], "fp8", ["has linear, gated_linear", "weights are in FP8"]),
        ([LINEAR], "fixed_linear", ["has linear;", "--set features.batch_invariant=true"]),
        ([INVARIANT, IN_FP8], "linear", ["has fixed_linear, fp8;", "--set model.dtype=bfloat16"]),
        ([LINEAR], "between_attention", ["has linear;", "--set model.dtype=bfloat16"]),
        ([], "gated_linear", ["has nothing that can be tuned;", "--set model.dtype=bfloat16"]),
    ],
)
def test_a_section_that_the_plan_lacks_is_named_with_those_it_has(
    tmp_path: Path, choices: list[dict[str, Any]], asked: str, said: list[str]
) -> None:
    """Also beside one that it has: what is asked for is measured, or it is an error."""
    there = next((name for name in ("linear", "fixed_linear") if f" {name}" in said[0]), asked)
    for more in ((), ("--only", there)):
        error = run_tune(tmp_path, choices, *more, "--only", asked).exception
        assert isinstance(error, ConfigError)
        assert str(error).startswith(f"--only {asked}: PLAN has no such layer, it {said[0]}")
        assert said[1] in str(error)
    assert not (tmp_path / "tuned.json").exists()


@pytest.fixture
def made_up_tuners(monkeypatch: pytest.MonkeyPatch) -> dict[str, Exception]:
    """A GPU's times, made up; what is put into the result under a section's name is raised by its tuner."""
    raised: dict[str, Exception] = {}

    class Made:
        def __init__(self, section: str) -> None:
            self.section = section

        def compile(self, shapes: Any, gated: bool = False, held: bool = True) -> None:
            pass

        compile_fixed = compile

        def best(self, *what: Any) -> dict[str, Any]:
            section = "gated_linear" if what[-1] is True else self.section
            rows = next(value for value in what if type(value) is int)
            if section in raised and rows > 8:
                raise raised[section]
            return {"rows": rows, "tile": TILE, "us": 1.0, "cublas_us": 2.0, "answer": None}

        def best_fixed(self, shape: Any) -> Any:
            if "fixed_linear" in raised:
                raise raised["fixed_linear"]
            return [[64, NUMBERS]], 2, {1: 1.0}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(tuning, "Tuner", lambda: Made("linear"))
    monkeypatch.setattr(fixed_tuning, "FixedTuner", lambda: Made("fixed_linear"))
    monkeypatch.setattr(fp8_tuning, "Fp8Tuner", lambda: Made("fp8"))
    return raised


SAVED = {
    "linear": ["linear"],
    "gated_linear": ["gated_linear"],
    "fixed_linear": ["fixed_linear"],
    "fp8": ["fp8_plain"],
}


@pytest.mark.parametrize("broken", [[], ["linear"], ["gated_linear"], ["fixed_linear", "fp8"], list(SAVED)])
def test_a_section_that_fails_leaves_the_others(
    tmp_path: Path, made_up_tuners: dict[str, Exception], broken: list[str]
) -> None:
    for name in broken:
        made_up_tuners[name] = torch.OutOfMemoryError(f"CUDA out of memory in {name}.\nFor debugging consider\n")
    result = run_tune(tmp_path, [LINEAR, GATED, INVARIANT, IN_FP8])
    assert result.exception is None
    assert result.return_value == (1 if broken else 0)
    expected = {part for name, parts in SAVED.items() if name not in broken for part in parts}
    out = tmp_path / "tuned.json"
    found = table_file.read(str(out)) if out.exists() else {}
    assert {name for name, shapes in found.items() if shapes} == expected
    assert ("written to" in result.output) == bool(expected)
    failed = [line for line in result.output.splitlines() if line.startswith("failed: ")]
    assert len(failed) == len(broken)
    for line, name in zip(failed, broken, strict=True):
        assert line.startswith(
            f"failed: {name}: OutOfMemoryError: CUDA out of memory in {name}.; For debugging consider"
        )
        assert line.endswith(f"--only {name}")


def test_a_region_that_was_asked_for_and_cannot_be_tuned_fails(
    tmp_path: Path, made_up_tuners: dict[str, Exception]
) -> None:
    plan = between_plan()
    plan[1]["request"]["merged"] = 2 * REGION["width"]
    result = run_tune(tmp_path, plan, "--only", "between_attention", "--only", "linear")
    assert result.return_value == 1
    assert "failed: between_attention: ConfigError: two of its products have one shape" in result.output
    assert table_file.read(str(tmp_path / "tuned.json"))["linear"]
    assert run_tune(tmp_path, plan).return_value == 0


REGION = {"hidden": 128, "attended": 128, "width": 384, "merged": 256, "eps": 1e-5, "dtype": "float16"}
ATTENTION = {"q_heads": 8, "kv_heads": 4, "head_dim": 16, "dtype": "float16", "cache_dtype": "float16", "scale": 0.25}


def between_plan() -> list[dict[str, Any]]:
    """As ``explain --json`` writes it: demands as lists."""
    more = {"device_type": "cuda", "demands": ["kv_layout:paged"]}
    attention = ATTENTION | more | {"cache_group": "full", "block_size": 16, "window": None, "sinks": False}
    return [
        row("attention.paged", **attention),
        row("fused.between_attention", **REGION, **more, weight_dtype="float16", limit=None),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU's times")
@pytest.mark.parametrize("faster", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_tiles_between_attentions_are_found_one_product_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faster: bool
) -> None:
    """Steps run in the interpreter; how long they take is made up: late products of three parts or one are fastest."""
    requests = between_tuning.requests_of(between_plan())
    assert requests is not None
    monkeypatch.setattr(between_tuning, "LEAST_LAYERS", 1)
    monkeypatch.setattr(between_tuning, "rotations", lambda size, most: 2)
    monkeypatch.setattr(between_tuning, "STEPS", ((64, 5), (128, 4)))
    monkeypatch.setattr(between_tuning, "CONTEXT", 20)
    monkeypatch.setattr(between_tuning, "ROWS", {16: 3})
    tuner = between_tuning.BetweenTuner(*requests, device="cpu")

    def worth(tile: Tile | OneRowTile | HeldTile) -> int:
        return 10 * tile.late + 3 * tile.splits + (tile.block_k == 64) if isinstance(tile, Tile) else 0

    def recorded(step: Any) -> tuple[float, torch.Tensor]:
        found, tiles = step(), tuner.region.tiles.get(3)
        if tiles is None:
            return (100.0 if faster else 10.0), found
        return 90.0 - sum(map(worth, tiles.values())), found

    monkeypatch.setattr(between_tuning, "recorded_us", recorded)
    tiles, us, by_parts = tuner.best(3)
    assert by_parts == (50.0 if faster else 5.0)
    assert (tiles is not None) == faster
    assert 3 not in tuner.region.tiles
    out = tmp_path / "tuned.json"
    save(out, tuner.entries({3: tiles}), "between_attention")
    table = table_file.read(str(out))["between_attention"]
    assert table.keys() == {"128x128", "768x128", "128x384", "256x128"}
    if not faster:
        assert all(entries == [[16, None]] for entries in table.values())
        return
    late = [False, True]
    assert table["128x384"] == [[16, [64, 16, 64, 3, 5, 4, *late]]]
    assert table["128x128"] == table["256x128"] == [[16, [64, 16, 64, 1, 5, 4, *late]]]
    assert table["768x128"] == [[16, [64, 16, 64, 1, 5, 4, *late]]]
    assert us == (90 - (20 + 3 * 14)) / 2
    monkeypatch.setattr(tables, "architecture", lambda device: "sm_90")
    built = BetweenAttention(requests[0], attrs.evolve(context(), settings=Settings(table=str(out))))
    assert built.tiles[3]["down"] == tables.tile_of([64, 16, 64, 3, 5, 4, *late])
    assert 17 not in built.tiles


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU's times")
@pytest.mark.parametrize(
    ("rows", "kind", "down"),
    [
        (1, OneRowTile, ["one", 16, 128]),
        pytest.param(3, HeldTile, ["held", 8, 2, 6], marks=pytest.mark.slow),
    ],
)
def test_products_between_attentions_may_hold_their_weight_in_registers(
    monkeypatch: pytest.MonkeyPatch, rows: int, kind: type, down: list[Any]
) -> None:
    """Where such tiles are the fastest: those of one row, and those of the matrix unit."""
    requests = between_tuning.requests_of(between_plan())
    assert requests is not None
    monkeypatch.setattr(between_tuning, "LEAST_LAYERS", 1)
    monkeypatch.setattr(between_tuning, "rotations", lambda size, most: 1)
    monkeypatch.setattr(between_tuning, "STEPS", ())
    monkeypatch.setattr(between_tuning, "CONTEXT", 20)
    monkeypatch.setattr(tuning, "ONE_ROW", ((16, 128, 1),))
    monkeypatch.setattr(OneRowTile, "registers", lambda self, inner: 40)
    tuner = between_tuning.BetweenTuner(*requests, device="cpu")

    def recorded(step: Any) -> tuple[float, torch.Tensor]:
        tiles = tuner.region.tiles.get(rows, {})
        return 90.0 - 10 * sum(isinstance(tile, kind) for tile in tiles.values()), step()

    monkeypatch.setattr(between_tuning, "recorded_us", recorded)
    tiles, _, _ = tuner.best(rows)
    assert tiles is not None
    assert tables.numbers_of(tiles["down"])[: len(down)] == down
    assert {type(tile) for tile in tiles.values()} == {kind}


def test_a_plan_whose_products_share_a_shape_is_not_tuned_as_a_region() -> None:
    plan = between_plan()
    assert between_tuning.requests_of(plan) is not None
    assert between_tuning.requests_of(plan[1:]) is None
    plan[1]["request"]["merged"] = 2 * REGION["width"]
    assert between_tuning.requests_of(plan) is None
