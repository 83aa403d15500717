"""The paged KV layout of the reference backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_support import operator

from deepinfer_core.api import CacheEntry, CacheGroupSpec, ConfigError, KVLayoutRequest

ENTRIES = (CacheEntry("key", (2, 8), "bfloat16"), CacheEntry("index", (3,), "float32"))


def paged(block_size: int = 16, **changes: Any) -> Any:
    fields: dict[str, Any] = {"name": "full", "layers": 3, "entries": ENTRIES}
    group = CacheGroupSpec(**(fields | changes))
    return operator(KVLayoutRequest(group=group, block_size=block_size))


def test_one_cache_a_layer_with_every_entry() -> None:
    caches = paged().allocate(5)
    assert len(caches) == 3
    for cache in caches:
        assert {name: tuple(entry.shape) for name, entry in cache.items()} == {
            "key": (5, 16, 2, 8),
            "index": (5, 16, 3),
        }
        assert cache["key"].dtype == torch.bfloat16
        assert cache["index"].dtype == torch.float32


def test_memory_is_zero_filled() -> None:
    assert all(not entry.any() for cache in paged().allocate(2) for entry in cache.values())


def test_layers_do_not_share_memory() -> None:
    first, second, _ = paged().allocate(2)
    first["key"].fill_(1)
    assert not second["key"].any()


def test_compressed_groups_keep_fewer_rows() -> None:
    assert paged(tokens_per_row=4).allocate(2)[0]["key"].shape == (2, 4, 2, 8)


@pytest.mark.parametrize("tokens_per_row", [1, 4])
def test_block_bytes_is_what_a_block_takes(tokens_per_row: int) -> None:
    layout = paged(tokens_per_row=tokens_per_row)
    used = sum(entry.numel() * entry.itemsize for cache in layout.allocate(7) for entry in cache.values())
    assert layout.block_bytes() * 7 == used


def test_no_blocks() -> None:
    assert paged().allocate(0)[0]["key"].shape == (0, 16, 2, 8)


def test_a_block_size_that_splits_a_row_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"block_size=10.*'full'.*multiple of 4"):
        paged(block_size=10, tokens_per_row=4)
