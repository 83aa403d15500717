"""The paged KV layout on the host: the reference's, in memory that costs nothing until it is written."""

from __future__ import annotations

import math

import numpy as np
import torch

from deepinfer_core.api import BuildContext, KVLayout, KVLayoutRequest, LayerCache


class PagedLayout:
    """Each entry lies as ``[num_blocks, block_size / tokens_per_row, *entry.shape]``, as in the reference.

    A pool is sized for the most that requests could ever hold. Zero pages of the system back it, so that a
    large pool takes the memory of the blocks that were used.
    """

    def __init__(self, request: KVLayoutRequest, context: BuildContext) -> None:
        self._reference: KVLayout = context.reference(request)  # checks the geometry and counts bytes
        self._group = request.group
        self._rows = request.block_size // request.group.tokens_per_row

    def block_bytes(self) -> int:
        return self._reference.block_bytes()

    def allocate(self, num_blocks: int) -> list[LayerCache]:
        return [
            {
                entry.name: _zero_pages((num_blocks, self._rows, *entry.shape), getattr(torch, entry.dtype))
                for entry in self._group.entries
            }
            for _ in range(self._group.layers)
        ]


def _zero_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.zeros(shape, dtype=dtype)
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
