"""Products whose sums over K are cut alike: every tile, for few rows and for many, gives a row the same bits.

On a GPU bit by bit; in the interpreter, whose products are the host's BLAS, as close as float32 is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import torch
from deepinfer_nvidia_sm100 import fixed_tuning, table_file, tables
from deepinfer_nvidia_sm100.command import shapes_of
from deepinfer_nvidia_sm100.ops import few_rows, fixed_linear
from deepinfer_nvidia_sm100.ops.few_rows import UNIT, Tile, part_length
from deepinfer_nvidia_sm100.ops.fixed_linear import FixedOrderLinear, splits_of
from deepinfer_nvidia_sm100.ops.fixed_many import ManyTile, launch_many
from deepinfer_nvidia_sm100.ops.linear import PackedWeight
from deepinfer_nvidia_sm100.settings import Settings
from deepinfer_nvidia_sm100.tuning import save
from gpu_support import DEVICE, DTYPES, ON_GPU, close, context, here, same_bits
from toys.seeds import module_seed

from deepinfer_core.api import ConfigError, LinearRequest

SEED = module_seed(__name__)
SHAPES = [(2560, 9728), (6144, 2560), (1000, 776)] if ON_GPU else [(200, 776), (70, 1536)]
ROWS = 300 if ON_GPU else 70


def normal(*shape: int, dtype: str, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(SEED + seed)
    return here(torch.randn(shape, generator=made).to(getattr(torch, dtype)))


def tiles(splits: int) -> Iterator[Tile]:
    for numbers in (
        [(16, 16, 256, 4, 4), (32, 32, 128, 5, 4), (64, 64, 128, 4, 4), (128, 16, 64, 5, 8), (128, 128, 64, 4, 8)]
        if ON_GPU
        else [(32, 32, 128, 2, 4), (64, 16, 64, 2, 4)]
    ):
        n, m, k, stages, warps = numbers
        yield Tile(block_n=n, block_m=m, block_k=k, splits=splits, stages=stages, warps=warps)
        if n >= 64:
            yield Tile(block_n=n, block_m=m, block_k=k, splits=splits, stages=3, warps=warps, described=True)


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize(("out", "inner"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tile_cuts_and_sums_alike(dtype: str, out: int, inner: int, splits: int) -> None:
    if ON_GPU and dtype == "float32":
        pytest.skip("one tile serves all numbers of rows there")
    x, weight = normal(ROWS, inner, dtype=dtype), normal(out, inner, dtype=dtype, seed=1) / inner**0.5
    bias, length = normal(out, dtype=dtype, seed=2), part_length(inner, splits, UNIT)
    expected = torch.full((ROWS, out), float("nan"), dtype=x.dtype, device=DEVICE)
    launch_many(x, weight, bias, expected, fixed_linear.MANY, splits, length)
    close(expected, (x.double() @ weight.double().T + bias.double()).cpu(), dtype)
    arrived = torch.zeros(1 << 14, dtype=torch.int32, device=DEVICE)
    for rows in (1, 17, ROWS):
        other = ManyTile(rows=64, columns=128, step=128, stages=2, warps=4)
        found = torch.full((rows, out), float("nan"), dtype=x.dtype, device=DEVICE)
        launch_many(x[:rows], weight, bias, found, other, splits, length)
        same_bits(found, expected[:rows])
        for tile in tiles(splits):
            if splits > 1 and part_length(inner, splits, tile.block_k) != length:
                continue
            found.fill_(float("nan"))
            few_rows.launch(x[:rows], weight, bias, found, tile, arrived)
            same_bits(found, expected[:rows])
            assert not arrived.any(), tile


def test_a_sum_is_cut_by_its_weights_shape_alone() -> None:
    assert splits_of(2560, 9728) > 1, "40 tiles of 64 columns leave most of the chip idle"
    assert splits_of(19456, 2560) == splits_of(151936, 2560) == 1
    for columns, inner in ((2560, 9728), (2560, 4096), (1024, 32768), (64, 100)):
        splits = splits_of(columns, inner)
        found = [fixed_linear.thumb(splits, columns, inner, rows) for rows in range(1, fixed_linear.EACH + 1)]
        assert {tile.splits for tile in found if tile is not None} == {splits}
        assert len({part_length(inner, splits, tile.block_k) for tile in found if tile is not None}) == 1 or splits == 1


def test_a_table_that_cuts_a_sum_in_two_ways_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    wanted = LinearRequest(
        in_features=1024, out_features=64, dtype="bfloat16", out_dtype="bfloat16", weight_dtype="bfloat16"
    )

    def build(*entries: list[object]) -> FixedOrderLinear:
        own.write_text(json.dumps({"linear": {}, "fixed_linear": {"64x1024": entries}}))
        tables.measured.cache_clear()
        table_file.read.cache_clear()
        return FixedOrderLinear(wanted, context(settings=Settings(table=str(own))))

    assert build([16, [64, 16, 128, 2, 4, 4]], [256, [64, 64, 64, 2, 4, 4]]).splits == 2
    with pytest.raises(ConfigError, match="fixed_linear 64x1024"):
        build([16, [64, 16, 128, 2, 4, 4]], [256, [64, 64, 128, 1, 4, 4]])


@pytest.mark.parametrize("rows", [1, 40, 64, 65, 200, 257])
def test_the_operator_with_a_cut_sum(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the tiles of its table, by rule beyond them, and by tiles for many rows."""
    dtype = DTYPES[-1]
    monkeypatch.setattr(tables, "measured", lambda *_: {"96x1024": [[16, [64, 16, 128, 2, 4, 4]]]})
    wanted = LinearRequest(in_features=1024, out_features=96, dtype="float16", out_dtype=dtype, weight_dtype=dtype)
    op = FixedOrderLinear(wanted, context())  # in the interpreter in float32, as if it had tiles for that
    op._request = attrs.evolve(wanted, dtype=dtype)
    weight = normal(96, 1024, dtype=dtype, seed=1) / 32
    x = normal(rows, 1025, dtype=dtype)
    packed = op.prepare([weight])
    expected = x[:, :-1].double() @ weight.double().T
    close(op.run(x[:, :-1].contiguous(), packed), expected.cpu(), dtype)
    assert op.splits == 2


@pytest.mark.parametrize("rows", fixed_tuning.ROWS)
@pytest.mark.parametrize("inner", [9728, 2560, 1000])
def test_tiles_that_are_tried_cut_a_sum_at_the_same_places(rows: int, inner: int) -> None:
    for splits in fixed_tuning.SPLITS:
        found = list(fixed_tuning.tiles(rows, splits, inner))
        assert {tile.splits for tile in found} <= {splits}
        assert splits == 1 or {part_length(inner, splits, t.block_k) for t in found} <= {
            part_length(inner, splits, UNIT)
        }
        assert all(tile.block_m >= rows or rows > fixed_linear.FEW for tile in found)
    assert list(fixed_tuning.tiles(rows, 1, inner))


def test_a_cut_is_chosen_over_all_numbers_of_rows() -> None:
    times = {1: {1: 10.0, 256: 50.0}, 2: {1: 11.0, 256: 30.0}, 4: {1: 9.0, 256: 45.0}}
    assert fixed_tuning.cheapest(times) == 2


def test_shapes_of_an_invariant_plan_are_apart() -> None:
    plain = {"in_features": 64, "out_features": 100, "dtype": "bfloat16", "out_dtype": "float32"}
    gate = {"in_features": 64, "width": 30, "dtype": "bfloat16", "demands": ["batch_invariant"]}
    choices = [
        {"op": "gemm.linear", "request": plain},
        {"op": "gemm.linear", "request": plain | {"out_features": 20, "demands": ["batch_invariant"]}},
        {"op": "fused.gated_linear", "request": gate},
    ]
    plan = {"plan": {"choices": choices}}
    assert shapes_of(plan) == ({"100x64": (100, 64, "float32")}, {})
    assert shapes_of(plan, invariant=True) == ({"20x64": (20, 64, "float32")}, {"60x64": (60, 64, "bfloat16")})


@pytest.mark.skipif(not ON_GPU, reason="tuning needs the GPU it tunes for")
def test_a_tuned_weight_is_cut_in_one_way(tmp_path: Path) -> None:
    tuner = fixed_tuning.FixedTuner()
    shape = (512, 1024, "bfloat16")
    tuner.compile_fixed([shape])
    found, splits, times = tuner.best_fixed(shape)
    assert found[-1][0] == fixed_linear.EACH
    assert {tile[3] for _, tile in found if tile is not None} <= {splits}
    assert all(us > 0 for us in times.values())
    own = tmp_path / "own.json"
    save(own, {"512x1024": found}, "fixed_linear")
    wanted = LinearRequest(
        in_features=1024, out_features=512, dtype="bfloat16", out_dtype="bfloat16", weight_dtype="bfloat16"
    )
    op = FixedOrderLinear(wanted, context(settings=Settings(table=str(own))))
    assert op.splits == splits


def test_a_trial_without_room_leaves_all_rows_to_this_packages_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a head it takes gigabytes, while weights are loaded."""
    half = {"dtype": "bfloat16", "out_dtype": "bfloat16", "weight_dtype": "bfloat16"}
    op = FixedOrderLinear(LinearRequest(in_features=64, out_features=96, **half), context())

    def full(weight: PackedWeight) -> frozenset[int]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.64 GiB.")

    monkeypatch.setattr(op, "_device", torch.device("cuda"))
    monkeypatch.setattr(op, "_equal_counts", full)
    assert op._tried(PackedWeight(torch.zeros(96, 64), None)) == frozenset()
