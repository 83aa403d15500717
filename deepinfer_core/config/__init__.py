"""Configuration: one tree of settings, read from arguments, ``--set``, the environment and a TOML file.

>>> config = load_config(overrides={"kv_cache": {"block_size": 32}})
>>> config.kv_cache.block_size, config.sources["kv_cache.block_size"]
(32, 'argument')
"""

from .environment import check_environment
from .load import load_config, override
from .plugin_settings import check_plugin_tables, plugin_settings
from .settings import Setting, all_settings
from .show import SettingValue, shown_values
from .tree import (
    EngineConfig,
    FeaturesConfig,
    KVCacheConfig,
    LoggingConfig,
    ModelConfig,
    ParallelConfig,
    PluginsConfig,
    SchedulingConfig,
    SpeculationConfig,
    StructuredOutputsConfig,
)

__all__ = [
    "EngineConfig",
    "FeaturesConfig",
    "KVCacheConfig",
    "LoggingConfig",
    "ModelConfig",
    "ParallelConfig",
    "PluginsConfig",
    "SchedulingConfig",
    "Setting",
    "SettingValue",
    "SpeculationConfig",
    "StructuredOutputsConfig",
    "all_settings",
    "check_environment",
    "check_plugin_tables",
    "load_config",
    "override",
    "plugin_settings",
    "shown_values",
]
