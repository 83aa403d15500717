"""Prefix hits when several window groups disagree about how long the shared prefix is."""

from __future__ import annotations

from deepinfer_core.api import CacheEntry, CacheGroupSpec
from deepinfer_core.engine.kv_cache import KVCache

ENTRIES = (CacheEntry("kv", (1,), "float32"),)
KEYS = [bytes([number]) for number in range(6)]


def group(name: str, window: int | None) -> CacheGroupSpec:
    kind = "full" if window is None else "window"
    return CacheGroupSpec(name=name, kind=kind, window=window, layers=1, entries=ENTRIES)  # type: ignore[arg-type]


def cache_with(**found: list[int]) -> KVCache:
    """Blocks of 4 tokens; each group holds the block numbers listed."""
    groups = [group("full", None), group("first", 4), group("second", 8)]
    cache = KVCache(groups, {g.name: 20 for g in groups}, block_size=4, slots=1, max_model_len=64, prefix_cache=True)
    for name, numbers in {"full": list(range(6)), **found}.items():
        pool = cache.groups[name].pool
        blocks = pool.allocate(len(numbers))
        for number, block in zip(numbers, blocks, strict=True):
            pool.publish(block, KEYS[number])
        pool.release(blocks)
    return cache


def test_a_group_that_shortens_the_prefix_makes_the_others_look_again() -> None:
    """``first`` could continue at 6 blocks and ``second`` at 3; there ``first`` lacks its window: both have it at 1."""
    cache = cache_with(first=[0, 4, 5], second=[0, 1, 2])
    hit = cache.lookup(KEYS, 30)
    assert hit.blocks == 1
    assert hit.tokens == 4
    assert [len(blocks) for blocks in hit.found.values()] == [1, 1, 1]


def test_agreement_is_taken_at_once() -> None:
    assert cache_with(first=[2, 5], second=[1, 2, 4]).lookup(KEYS, 30).blocks == 3


def test_no_prefix_in_common() -> None:
    assert cache_with(first=[5], second=[0, 1, 2]).lookup(KEYS, 30).blocks == 0
