"""Products of many FP8 rows with FP8 weights on compute capability 9.0, by warps that have one task each.

As in :mod:`.fp8_many_rows`, what the matrix unit adds over 128 elements is scaled and added to a float32 sum outside of
it. There all warps of a program do that at the same time, and the matrix unit waits. Here one warp copies, and two
groups of four warps multiply by turns: one adds while the matrix unit works for the other. A tile of 256 rows reads a
quarter less from the second-level cache for each product than one of 128.

Triton's compiler does not make such kernels for this generation; this one is written in its lower language, Gluon,
which the interpreter does not know, so it is tested on a GPU only. A row's bits do not depend on the tile.

Floor: as in :mod:`.fp8_many_rows`.
"""

from __future__ import annotations

import attrs
import torch
import triton

from deepinfer_nvidia_sm100 import tables

from .dependent import dependent
from .fp8_many_rows import GROUP, multiprocessors, operands
from .starting import starter

VERSIONS = ("3.6.",)
"""Of Triton, that the kernel was compiled with."""
OUT_ROWS = 64
"""Rows of a tile that a group multiplies at a time, as one instruction takes them."""
UNROLLED = (8, 4, 2, 1)
"""Steps of a loop's turn in tiles of 128 rows: the most that divide them."""
REGISTERS = {2: (240, 24), 3: (160, 24)}
"""By groups that multiply: of each of their threads, and of those that copy."""


@attrs.frozen(kw_only=True)
class HopperTile:
    """One way to run the kernel. ``together``: rows of tiles that share the cache. ``box``: the copy engine writes."""

    block_m: int
    block_n: int
    stages: int
    together: int = 8
    box: bool = True

    @property
    def groups(self) -> int:
        """Of four warps that multiply."""
        return 3 if self.block_m == 192 else 2

    @property
    def height(self) -> int:
        """Rows of a block, whose number must be a power of two."""
        return 64 if self.block_m == 192 else self.block_m

    @property
    def shared_bytes(self) -> int:
        """Of the ring, and of results in 16 bits on their way out."""
        return GROUP * (self.block_m + self.block_n) * self.stages + (
            2 * self.groups * OUT_ROWS * self.block_n if self.box else 0
        )


def usable(device: torch.device) -> bool:
    """Is this the chip, and a version of Triton, that the kernel was written for? Gluon changes between versions."""
    return tables.architecture(device) == "sm_90" and triton.__version__.startswith(VERSIONS)


def launch(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    scale_rows: int,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: HopperTile,
    *,
    compile_only: bool = False,
) -> None:
    """``out [M, N] = x [M, K] @ weight [N, K].T (+ bias)``, as the kernel says."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .fp8_hopper_kernel import SWIZZLED, SWIZZLED_OUT, fp8_hopper_kernel

    def describe(tensor: torch.Tensor, block: list[int]) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, block, SWIZZLED if tensor.element_size() == 1 else SWIZZLED_OUT)

    (rows, columns), inner = out.shape, x.shape[1]
    tiles = triton.cdiv(rows, tile.block_m) * triton.cdiv(columns, tile.block_n)
    box = tile.box and out.element_size() == 2 and columns % 8 == 0  # rows of 16 bytes, which the copy engine wants
    boxes = [OUT_ROWS, tile.block_n] if box else None
    given = x, x_scale, weight, scale, bias, out, tile.height, tile.block_n, boxes
    multiplying, copying = REGISTERS[tile.groups]
    starter(fp8_hopper_kernel, (min(tiles, multiprocessors(x.device)),), compile_only=compile_only)(
        *operands(describe, *given),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        STAGES=tile.stages,
        TOGETHER=tile.together,
        SCALE_ROWS=scale_rows,
        UNROLLED=next(size for size in UNROLLED if inner // GROUP % size == 0),
        BIAS=bias is not None,
        BOX=box,
        OUT_LAYOUT=SWIZZLED_OUT,
        MULTIPLYING=multiplying,
        COPYING=copying,
        num_warps=4,
        **dependent(x),
    )
