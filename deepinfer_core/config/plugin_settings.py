"""Settings of plugins: typed by the plugin, read once it is loaded."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

from deepinfer_core.api import ConfigError

from .layers import plugin_key
from .settings import nearest
from .structure import structure
from .tree import EngineConfig

T = TypeVar("T")


def plugin_settings(config: EngineConfig, plugin: str, settings: type[T]) -> T:
    """A plugin's settings, from ``plugins.<name>`` and ``DEEPINFER_<NAME>__<FIELD>``.

    Args:
        config: the loaded configuration.
        plugin: its name.
        settings: the attrs class it declares in ``PluginInfo.settings``; every field has a default.

    Raises:
        ConfigError: an unknown field, a value of the wrong type, or one that the class refuses.
    """
    key = plugin_key(plugin)
    sources = config.sources

    def source_of(path: str) -> str:
        below = (source for field, source in sources.items() if field.startswith(f"{path}."))
        return sources.get(path) or next(below, "default")

    return structure(
        config.plugins.settings.get(key, {}),
        settings,
        prefix=f"plugins.{key}",
        source_of=source_of,
    )


def check_plugin_tables(config: EngineConfig, plugins: Collection[str]) -> None:
    """Refuse settings of plugins that are not there.

    Args:
        config: the loaded configuration.
        plugins: names of the plugins that have settings.

    Raises:
        ConfigError: ``plugins.<name>`` for an unknown name, with the nearest one.
    """
    known = {plugin_key(name) for name in plugins}
    for table in config.plugins.settings:
        if table not in known:
            sources = [source for path, source in config.sources.items() if path.startswith(f"plugins.{table}.")]
            origin = f" (from {sources[0]})" if sources else ""
            raise ConfigError(
                f"plugins.{table}{origin}: no plugin of this name with settings is loaded{nearest(table, known)}"
            )
