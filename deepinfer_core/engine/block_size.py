"""The size of a cache block, where nobody set one."""

from __future__ import annotations

import math

import attrs

from deepinfer_core.api import ConfigError, ModelSpec
from deepinfer_core.config.tree import EngineConfig, KVCacheConfig

SETTING = "kv_cache.block_size"


def fit_block_size(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """The configuration with a block size that suits the model.

    A size nobody set becomes the smallest multiple of it that the model can use, and ``sources`` says so.

    Raises:
        ConfigError: a size that somebody set and that the model cannot use.
    """
    size, alignment = config.kv_cache.block_size, spec.block_alignment
    if size % alignment == 0:
        return config
    if config.sources.get(SETTING, "default") != "default" or size != KVCacheConfig().block_size:
        raise ConfigError(f"{SETTING}={size}: {spec.architecture} needs a multiple of {alignment}")
    return attrs.evolve(
        config,
        kv_cache=attrs.evolve(config.kv_cache, block_size=math.lcm(size, alignment)),
        sources={**config.sources, SETTING: f"default, for {spec.architecture}"},
    )
