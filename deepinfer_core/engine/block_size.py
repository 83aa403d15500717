"""The size of a cache block, where nobody set one."""

from __future__ import annotations

import math

import attrs

from deepinfer_core.api import ConfigError, DeviceInfo, ModelSpec
from deepinfer_core.config.tree import EngineConfig, KVCacheConfig

SETTING = "kv_cache.block_size"


def fit_block_size(config: EngineConfig, spec: ModelSpec, device: DeviceInfo) -> EngineConfig:
    """The configuration with a block size that suits the model and the device.

    A size nobody set becomes the smallest multiple of it that the model can use, or what the device's operators like
    best if the model takes any, and ``sources`` says so.

    Raises:
        ConfigError: a size that somebody set and that the model cannot use.
    """
    size, alignment = config.kv_cache.block_size, spec.block_alignment
    unset = config.sources.get(SETTING, "default") == "default" and size == KVCacheConfig().block_size
    if unset and alignment == 1 and device.block_size is not None:
        return _with(config, device.block_size, device.backend)
    if size % alignment == 0:
        return config
    if not unset:
        raise ConfigError(f"{SETTING}={size}: {spec.architecture} needs a multiple of {alignment}")
    return _with(config, math.lcm(size, alignment), spec.architecture)


def _with(config: EngineConfig, size: int, reason: str) -> EngineConfig:
    return attrs.evolve(
        config,
        kv_cache=attrs.evolve(config.kv_cache, block_size=size),
        sources={**config.sources, SETTING: f"default, for {reason}"},
    )
