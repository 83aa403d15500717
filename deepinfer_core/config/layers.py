"""Layers of values: each source flattened to dotted paths, then laid one over the other."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from deepinfer_core.api import ConfigError

from .accept import Text
from .settings import all_settings, group_of, instead_of


@attrs.frozen
class Given:
    """A value as it was given, and by whom."""

    value: Any
    source: str


Layer = Mapping[str, Given]
"""Dotted path -> value."""


def plugin_key(name: str) -> str:
    """A plugin's name as it appears in paths and variables: ``spec-decode`` -> ``spec_decode``."""
    return name.lower().replace("-", "_").replace(".", "_")


def mapping_layer(table: Mapping[str, Any], source: str) -> Layer:
    """Nested tables as a layer. Keys may be dotted paths themselves."""
    return dict(_flatten(table, source, ""))


def file_layer(file: str | Path) -> Layer:
    """A TOML file as a layer.

    Raises:
        ConfigError: not readable or not TOML; names the file and, for bad TOML, the line.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"configuration file {str(file)!r} cannot be read: {reason}") from None
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"configuration file {str(file)!r} is not TOML: {error}") from None
    return mapping_layer(table, f"file {file}")


def sets_layer(sets: Sequence[str], source: str = "--set") -> Layer:
    """``key=value`` strings as a layer; of two for the same key the later wins."""
    layer: dict[str, Given] = {}
    for item in sets:
        path, equals, value = item.partition("=")
        path = path.strip().replace('"', "")  # ops."gemm.linear", as errors and TOML write it
        if not equals or not path:
            raise ConfigError(f"{source} {item!r}: expected key=value, as in kv_cache.block_size=16")
        layer.update(mapping_layer({path: Text(value.strip())}, source))
    return layer


def merge(layers: Sequence[Layer]) -> Layer:
    """Later layers win. Every path is checked to be a setting's.

    Raises:
        ConfigError: an unknown setting, with the nearest one.
    """
    merged: dict[str, Given] = {}
    for layer in layers:
        for path, given in layer.items():
            if not _is_setting(path):
                raise ConfigError(f"unknown setting {path!r} (from {given.source}){instead_of(path)}")
            merged[path] = given
    return merged


def nested(layer: Layer) -> dict[str, Any]:
    """A merged layer as tables in the shape of the tree."""
    tables: dict[str, Any] = {}
    for path, given in layer.items():
        *groups, name = _place(path)
        table = tables
        for group in groups:
            table = table.setdefault(group, {})
        table[name] = given.value
    return tables


def _flatten(table: Mapping[str, Any], source: str, prefix: str) -> Iterator[tuple[str, Given]]:
    for key, value in table.items():
        path = _canonical(f"{prefix}{key}")
        if isinstance(value, Mapping) and _has_settings_below(path):
            yield from _flatten(value, source, f"{path}.")
        elif group_of(path) is not None:
            fields = ", ".join(setting.removeprefix(f"{path}.") for setting in all_settings() if _below(setting, path))
            raise ConfigError(f"{path} = {value!r} (from {source}): {path} is a group; set one of its fields: {fields}")
        elif path == "ops":
            raise ConfigError(f"ops = {value!r} (from {source}): ops is a table; set ops.<operator>")
        else:
            yield path, Given(value, source)


def _below(setting: str, path: str) -> bool:
    return setting.startswith(f"{path}.")


def _canonical(path: str) -> str:
    parts = path.split(".")
    if parts[0] == "plugins" and len(parts) > 1 and path not in all_settings():
        parts[1] = plugin_key(parts[1])
    return ".".join(parts)


def _has_settings_below(path: str) -> bool:
    if group_of(path) is not None or path == "ops" or path.startswith("ops."):
        return True
    return _is_plugin_table(path)


def _is_plugin_table(path: str) -> bool:
    return path.startswith("plugins.") and path.count(".") == 1 and path not in all_settings()


def _is_setting(path: str) -> bool:
    if path.startswith("ops.") or path in all_settings():
        return path != "ops"
    table, _, field = path.rpartition(".")
    return _is_plugin_table(table) and bool(field)


def _place(path: str) -> list[str]:
    """Keys that lead to a setting in the tree."""
    if path.startswith("ops."):
        return ["ops", path.removeprefix("ops.")]
    if path.startswith("plugins.") and path not in all_settings():
        _, plugin, field = path.split(".")
        return ["plugins", "settings", plugin, field]
    return path.split(".")
