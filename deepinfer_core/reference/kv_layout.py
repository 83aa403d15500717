"""The paged KV layout: one tensor per entry and layer, blocks outermost."""

from __future__ import annotations

import math

import torch

from deepinfer_core.api import BuildContext, ConfigError, KVLayoutRequest, LayerCache

from .dtypes import dtype_named


class PagedLayout:
    """Each entry lies as ``[num_blocks, block_size / tokens_per_row, *entry.shape]``, row-major."""

    def __init__(self, request: KVLayoutRequest, context: BuildContext) -> None:
        group = request.group
        if request.block_size % group.tokens_per_row:
            raise ConfigError(
                f"kv_cache.block_size={request.block_size}: cache group {group.name!r} keeps one row for "
                f"{group.tokens_per_row} tokens; use a multiple of {group.tokens_per_row}"
            )
        self._group = group
        self._rows = request.block_size // group.tokens_per_row
        self._device = context.device

    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the group."""
        row = sum(math.prod(entry.shape) * dtype_named(entry.dtype).itemsize for entry in self._group.entries)
        return self._group.layers * self._rows * row

    def allocate(self, num_blocks: int) -> list[LayerCache]:
        """One zero-filled cache per layer, entry name -> ``[num_blocks, rows_per_block, *entry.shape]``."""
        return [
            {
                entry.name: torch.zeros(
                    (num_blocks, self._rows, *entry.shape), dtype=dtype_named(entry.dtype), device=self._device
                )
                for entry in self._group.entries
            }
            for _ in range(self._group.layers)
        ]
