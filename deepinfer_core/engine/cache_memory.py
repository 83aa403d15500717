"""How much memory the caches get, and the caches themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from deepinfer_core.api import CacheGroupSpec, ConfigError, Device, KVLayout, LayerCache, MemoryInfo

from .kv_cache import KVCache
from .planning import PlannedEngine

_ADDRESSES = 1 << 62
"""Bytes; no device has so many."""

HOST_FRACTION, DEVICE_FRACTION = 0.25, 0.9
"""Share of free memory the caches may take when ``kv_cache.memory_fraction`` is not set."""


@attrs.frozen(kw_only=True)
class CacheMemory:
    """The caches: who owns which block, the tensors by group and layer, and bytes by group."""

    cache: KVCache
    layer_caches: Mapping[str, Sequence[LayerCache]]
    cache_bytes: Mapping[str, int]


def allocate_caches(
    planned: PlannedEngine, groups: Sequence[CacheGroupSpec], layouts: Mapping[str, KVLayout]
) -> CacheMemory:
    """Caches of all groups, as large as the settings or the memory say.

    Raises:
        ConfigError: they do not fit the memory, or cannot hold one request.
    """
    config = planned.config
    block_bytes = {name: layout.block_bytes() for name, layout in layouts.items()}
    num_blocks = _num_blocks(planned, groups, block_bytes, planned.device.memory())
    layer_caches = _layer_caches(planned.device, layouts, num_blocks, block_bytes)
    cache = KVCache(
        groups,
        num_blocks,
        block_size=config.kv_cache.block_size,
        slots=config.scheduling.max_running,
        max_model_len=planned.spec.max_model_len,
        prefix_cache=config.kv_cache.prefix_cache,
        retain_windows=config.kv_cache.window_retention == "full",
    )
    sizes = {f"cache_{name}": num_blocks[name] * size for name, size in block_bytes.items()}
    return CacheMemory(cache=cache, layer_caches=layer_caches, cache_bytes=sizes)


def _layer_caches(
    device: Device, layouts: Mapping[str, KVLayout], num_blocks: Mapping[str, int], block_bytes: Mapping[str, int]
) -> dict[str, list[LayerCache]]:
    """The memory of every group's layers.

    Raises:
        ConfigError: the device has not so much.
    """
    size = sum(count * block_bytes[name] for name, count in num_blocks.items())
    try:
        if size >= _ADDRESSES:  # libraries refuse these in ways of their own
            raise MemoryError
        return {name: layout.allocate(num_blocks[name]) for name, layout in layouts.items()}
    except Exception as error:
        if not isinstance(error, MemoryError) and not device.is_out_of_memory(error):
            raise
        raise ConfigError(
            f"kv_cache: {max(num_blocks.values())} blocks take {size / 2**20:.0f} MiB, and {device.info.backend} has "
            f"{device.memory().free / 2**20:.0f} MiB free: lower kv_cache.num_blocks or kv_cache.memory_fraction"
        ) from error


def _num_blocks(
    planned: PlannedEngine, groups: Sequence[CacheGroupSpec], block_bytes: Mapping[str, int], memory: MemoryInfo
) -> dict[str, int]:
    """Blocks of each group, null block included.

    A full group gets what its share of memory allows, and never more than all requests at full length could
    use; a window group what running requests can look back on plus one step's rows.
    """
    config, spec = planned.config, planned.spec
    # Drafts being verified, and as many more that are being made.
    ahead = 0 if planned.drafter is None else 2 * config.speculation.max_draft_tokens
    running, block_size = config.scheduling.max_running, config.kv_cache.block_size
    if config.kv_cache.num_blocks is not None:
        _check_window_blocks(groups, config.kv_cache.num_blocks, block_size)
        return {g.name: config.kv_cache.num_blocks for g in groups}
    most = {
        g.name: _most_blocks(g, spec.max_model_len, running, config.scheduling.max_batch_tokens, block_size, ahead)
        for g in groups
    }
    default = HOST_FRACTION if planned.device.info.type == "cpu" else DEVICE_FRACTION
    budget = memory.free * (config.kv_cache.memory_fraction or default)
    wanted = sum(most[name] * size for name, size in block_bytes.items())
    share = min(1.0, budget / wanted) if wanted else 1.0
    blocks = {name: max(2, int(count * share)) for name, count in most.items()}
    need = -(-spec.max_model_len // block_size) + 1
    for group in groups:
        if blocks[group.name] < min(need, most[group.name]):
            lowest = need * block_bytes[group.name]
            raise ConfigError(
                f"kv_cache: {budget / 2**20:.0f} MiB give group {group.name!r} {blocks[group.name]} blocks, fewer than "
                f"one request of max_model_len={spec.max_model_len} needs ({lowest / 2**20:.0f} MiB): "
                "lower model.max_model_len or raise kv_cache.memory_fraction"
            )
    return blocks


def _check_window_blocks(groups: Sequence[CacheGroupSpec], num_blocks: int, block_size: int) -> None:
    """Refuse pools too small for one row of a model that has windows only; others are bounded by their length."""
    windows = [g.window for g in groups if g.window is not None]
    need = 2 + max((-(-(window - 1) // block_size) for window in windows), default=0)
    if groups and len(windows) == len(groups) and num_blocks < need:
        raise ConfigError(
            f"kv_cache.num_blocks={num_blocks}: a window of {max(windows)} tokens needs at least {need} "
            f"blocks of {block_size}, the null block included"
        )


def _most_blocks(
    group: CacheGroupSpec, max_model_len: int, running: int, batch_tokens: int, block_size: int, ahead: int
) -> int:
    if group.window is None:
        return running * -(-max_model_len // block_size) + 1
    window = running * (-(-(group.window + ahead) // block_size) + 2)
    return min(window + -(-batch_tokens // block_size), running * -(-max_model_len // block_size)) + 1
