"""Products in FP8 by warps with one task each, which only a GPU of compute capability 9.0 runs, against float64."""

from __future__ import annotations

import pytest
import torch
from deepinfer_nvidia_sm100.ops import fp8_hopper, fp8_many_rows
from deepinfer_nvidia_sm100.ops.fp8_hopper import HopperTile
from deepinfer_nvidia_sm100.ops.fp8_many_rows import ManyTile
from deepinfer_nvidia_sm100.ops.fp8_weight import Fp8Weight, pack
from deepinfer_nvidia_sm100.ops.quantise_rows import quantise_rows
from gpu_support import DEVICE, ON_GPU, here
from test_nvidia_fp8_linear import check, inputs, request, rounded, weights

pytestmark = pytest.mark.skipif(
    not ON_GPU or torch.cuda.get_device_capability() != (9, 0), reason="needs a GPU of compute capability 9.0"
)

TILES = [
    HopperTile(block_m=256, block_n=128, stages=4),
    HopperTile(block_m=256, block_n=128, stages=4, together=1, box=False),
    HopperTile(block_m=192, block_n=128, stages=4),
    HopperTile(block_m=192, block_n=64, stages=6, together=3, box=False),
    HopperTile(block_m=128, block_n=128, stages=5, together=3),
    HopperTile(block_m=128, block_n=128, stages=6, box=False),
    HopperTile(block_m=128, block_n=64, stages=8),
]
SHAPES = [(1, 8, 128), (130, 200, 384), (64, 128, 256), (333, 1001, 1536), (700, 40000, 256), (5000, 300, 640)]


def product(x: torch.Tensor, packed: Fp8Weight, tile: HopperTile, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    data, scale = quantise_rows(here(x))
    out = torch.full((x.shape[0], packed.data.shape[0]), float("nan"), device=DEVICE, dtype=dtype)
    fp8_hopper.launch(data, scale, packed.data, packed.scale, packed.rows, packed.bias, out, tile)
    return out


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("rows", "out", "inner"), SHAPES)
def test_tiles(rows: int, out: int, inner: int, tile: HopperTile) -> None:
    """More tiles than programs, fewer, and one; rows and columns that end within a tile."""
    parts, values = weights((out,), inner)
    packed = pack(request(out, inner, "bfloat16"), DEVICE, parts, None)
    x = inputs(rows, inner, "bfloat16")
    expected = rounded(x) @ values.T
    check(product(x, packed, tile), expected, "bfloat16")
    check(product(x, packed, tile, torch.float32), expected, "float32")


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_bias_is_added(dtype: str, tile: HopperTile) -> None:
    parts, values = weights((128, 72), 512)
    bias = torch.randn(200).to(getattr(torch, dtype))
    packed = pack(request(200, 512, dtype), DEVICE, parts, here(bias))
    x = inputs(300, 512, dtype) * 0.02
    expected = rounded(x) @ values.T + bias.double()
    check(product(x, packed, tile, getattr(torch, dtype)), expected, dtype)


def test_blocks_of_256_rows_of_the_weight() -> None:
    parts, values = weights((700,), 384, 256)
    packed = pack(request(700, 384, "bfloat16", weight_dtype="fp8:e4m3:256x128"), DEVICE, parts, None)
    x = inputs(200, 384, "bfloat16")
    check(product(x, packed, TILES[0]), rounded(x) @ values.T, "bfloat16")


def test_a_row_has_the_same_bits_in_every_tile_and_every_time() -> None:
    parts, _ = weights((1000,), 2048)
    packed = pack(request(1000, 2048, "bfloat16"), DEVICE, parts, None)
    x = inputs(777, 2048, "bfloat16")
    whole = product(x, packed, TILES[0])
    for tile in TILES:
        for _ in range(5):
            assert torch.equal(product(x, packed, tile), whole)
        assert torch.equal(product(x[300:301], packed, tile), whole[300:301])


def test_what_the_other_kernel_computes() -> None:
    """Both add in the same order."""
    parts, _ = weights((1000,), 2048)
    packed = pack(request(1000, 2048, "bfloat16"), DEVICE, parts, None)
    x = inputs(300, 2048, "bfloat16")
    data, scale = quantise_rows(here(x))
    out = torch.empty((300, 1000), device=DEVICE, dtype=torch.float32)
    other = ManyTile(block_m=128, block_n=128, halves=1, stages=4, warps=8)
    fp8_many_rows.launch(data, scale, packed.data, packed.scale, packed.rows, None, out, other)
    found = product(x, packed, TILES[0], torch.float32)
    assert float((found - out).norm() / out.norm()) < 1e-6


def test_nan_and_infinity_stay_in_their_rows() -> None:
    parts, _ = weights((256,), 512)
    packed = pack(request(256, 512, "bfloat16"), DEVICE, parts, None)
    x = inputs(300, 512, "bfloat16")
    whole = product(x, packed, TILES[0])
    x[17, 3] = float("nan")
    broken = product(x, packed, TILES[0])
    assert bool(broken[17].isnan().all())
    keep = torch.arange(300) != 17
    assert torch.equal(broken[here(keep)], whole[here(keep)])
