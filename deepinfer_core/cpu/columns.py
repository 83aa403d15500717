"""One row's product read from a weight in oneDNN's blocked layout, as a weighted sum of the weight's columns.

On processors with 256- and 512-bit vectors oneDNN keeps a float32 weight ``[out, in]`` as ``[out / 64, in, 64]``: 64
outputs side by side for each input channel. The product of one row is then, for every 64 outputs, a sum of ``in``
vectors weighted by the row, which is what ``embedding_bag`` computes. It begins sooner than a oneDNN product and, with
256-bit vectors, reads faster. The layout is compared with the weight before anything relies on it.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import attrs
import numpy as np
import torch

WIDTH = 64
"""Outputs side by side in a block."""

LARGEST = {"AVX512": 1 << 21, "AVX2": 1 << 31}
"""Elements of a weight up to which a sum of columns is faster than oneDNN's product, by the host's vectors."""


def largest() -> int:
    """Elements of the largest weight whose columns are worth summing on this host."""
    if not hasattr(torch.ops.mkldnn, "data_ptr"):
        return 0
    return LARGEST.get(torch.backends.cpu.get_cpu_capability(), 0)


@attrs.frozen(eq=False)
class Sums:
    """How the columns of a weight ``[out, in]`` are summed.

    Attributes:
        every, begins: the columns one after the other, and where those of each block begin.
        scales: ``[out / 64, in]`` to put the row into, for each block; flat: the same memory. One product at a time.
    """

    every: torch.Tensor
    begins: torch.Tensor
    scales: torch.Tensor
    flat: torch.Tensor

    @classmethod
    def of(cls, out: int, inp: int) -> Sums:
        scales = torch.empty(out // WIDTH, inp)
        return cls(*_lists(out // WIDTH, inp), scales, scales.view(-1))


@lru_cache(maxsize=64)
def _lists(blocks: int, inp: int) -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.int32 if blocks * inp < 2**31 else torch.int64
    return torch.arange(blocks * inp, dtype=index), torch.arange(0, blocks * inp, inp, dtype=index)


@attrs.frozen(eq=False)
class Columns:
    """A packed weight's own memory as ``[out / 64 * in, 64]`` float32, valid as long as the weight."""

    vectors: torch.Tensor
    sums: Sums

    def product(self, row: torch.Tensor) -> torch.Tensor:
        """``[1, in]`` float32 -> fresh ``[1, out]``."""
        sums, bag = self.sums, torch._embedding_bag_forward_only
        sums.scales.copy_(row)
        return bag(self.vectors, sums.every, sums.begins, False, 0, False, sums.flat)[0].view(1, -1)


def blocks_of(packed: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """The memory of ``packed`` as :class:`Columns` has it; None where it does not hold ``weight [out, in]`` so."""
    out, inp = weight.shape
    if out % WIDTH or torch.ops.mkldnn._nbytes(packed) != weight.numel() * weight.itemsize:
        return None
    memory = (ctypes.c_float * weight.numel()).from_address(torch.ops.mkldnn.data_ptr(packed))
    found = torch.from_numpy(np.ctypeslib.as_array(memory))
    same = torch.equal(found.view(-1, inp, WIDTH).transpose(1, 2), weight.view(-1, WIDTH, inp))
    return found.view(-1, WIDTH) if same else None
