"""Products whose sums over K are cut alike: every tile, for few rows and for many, gives a row the same bits.

On a GPU bit by bit; in the interpreter, whose products are the host's BLAS, as close as float32 is.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import torch
from deepinfer_nvidia_sm100 import tables
from deepinfer_nvidia_sm100.ops import few_rows, fixed_linear
from deepinfer_nvidia_sm100.ops.few_rows import Tile
from deepinfer_nvidia_sm100.ops.fixed_linear import FixedOrderLinear, part_length, splits_of
from deepinfer_nvidia_sm100.ops.fixed_many import ManyTile, launch_many
from deepinfer_nvidia_sm100.settings import Settings
from gpu_support import DEVICE, DTYPES, ON_GPU, close, context, here, same_bits

from deepinfer_core.api import ConfigError, LinearRequest

SEED = secrets.randbits(31)
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
    bias, length = normal(out, dtype=dtype, seed=2), part_length(inner, splits)
    expected = torch.full((ROWS, out), float("nan"), dtype=x.dtype, device=DEVICE)
    launch_many(x, weight, bias, expected, fixed_linear.MANY, splits, length)
    close(expected, x.double() @ weight.double().T + bias.double(), dtype)
    arrived = torch.zeros(4096, dtype=torch.int32, device=DEVICE)
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
    close(op.run(x[:, :-1].contiguous(), packed), expected, dtype)
    assert op.splits == 2
