"""A configuration for display: every value with its source."""

from __future__ import annotations

from typing import Any

import attrs

from .settings import all_settings
from .tree import EngineConfig


@attrs.frozen
class SettingValue:
    """One line of the display. ``value`` is plain data, as JSON knows it."""

    path: str
    value: Any
    source: str


def shown_values(config: EngineConfig) -> list[SettingValue]:
    """All settings in the tree's order, then the plugins' own."""
    rows: list[SettingValue] = []
    for path, setting in all_settings().items():
        value: Any = config
        for part in path.split("."):
            value = getattr(value, part)
        if setting.is_table:
            rows.extend(_row(config, f"{path}.{key}", value[key]) for key in sorted(value))
        else:
            rows.append(_row(config, path, value))
    for plugin, fields in sorted(config.plugins.settings.items()):
        rows.extend(_row(config, f"plugins.{plugin}.{field}", fields[field]) for field in sorted(fields))
    return rows


def _row(config: EngineConfig, path: str, value: Any) -> SettingValue:
    plain = list(value) if isinstance(value, tuple) else str(value) if isinstance(value, str) else value
    return SettingValue(path, plain, config.sources.get(path, "default"))
