"""KV layouts on the host, in memory that costs nothing until it is written.

``paged`` is the reference's. In ``transposed_keys`` a block holds its rows head by head, and its keys transposed: the
products of a query with a block's keys are then a weighted sum of whole vectors, one for each channel, as the products
of weights with values are. Both are what the host does fastest, and both read the cache in order.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from deepinfer_core.api import BuildContext, KVLayout, KVLayoutRequest, LayerCache

from .huge_pages import ask_for_huge_pages

LINE = 64
"""Bytes of a cache line. A vector that lies across two takes two reads."""


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


class TransposedKeysLayout:
    """``key [num_blocks, kv_heads, head_dim, block_size]``, ``value [num_blocks, kv_heads, block_size, head_dim]``.

    For groups of a key and a value of one shape ``(kv_heads, head_dim)``, float32.
    """

    def __init__(self, request: KVLayoutRequest, context: BuildContext) -> None:
        self._layers = request.group.layers
        heads, dim = request.group.entries[0].shape
        self._shapes = {"key": (heads, dim, request.block_size), "value": (heads, request.block_size, dim)}

    def block_bytes(self) -> int:
        return self._layers * sum(math.prod(shape) for shape in self._shapes.values()) * torch.float32.itemsize

    def allocate(self, num_blocks: int) -> list[LayerCache]:
        return [
            {name: _zero_pages((num_blocks, *shape), torch.float32) for name, shape in self._shapes.items()}
            for _ in range(self._layers)
        ]


def _zero_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.zeros(shape, dtype=dtype)
    memory = np.zeros(size + LINE, np.uint8)
    ask_for_huge_pages(memory.ctypes.data, size, used=False)
    start = -memory.ctypes.data % LINE
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)
