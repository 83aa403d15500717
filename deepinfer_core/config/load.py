"""Reading the configuration from all its sources."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from .environment import environment_layer
from .layers import Given, Layer, file_layer, mapping_layer, merge, nested, sets_layer
from .settings import FILE_VARIABLE, all_settings
from .structure import structure
from .tree import EngineConfig


def load_config(
    *,
    file: str | Path | None = None,
    environ: Mapping[str, str] = os.environ,
    overrides: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
) -> EngineConfig:
    """The configuration: ``overrides`` win over ``sets``, these over the environment, the file and the defaults.

    Args:
        file: a TOML file; None takes the one that ``DEEPINFER_CONFIG`` names, if any.
        environ: variables by name.
        overrides: nested tables or dotted paths, from the caller's arguments.
        sets: ``key=value`` strings; the value is TOML, or a plain string.

    Raises:
        ConfigError: an unknown name, a value of the wrong type or out of range, a file that cannot be read.
    """
    named = file if file is not None else environ.get(FILE_VARIABLE) or None
    return _build(
        [
            file_layer(named) if named is not None else {},
            environment_layer(environ),
            sets_layer(sets),
            mapping_layer(overrides or {}, "argument"),
        ]
    )


def override(
    config: EngineConfig, overrides: Mapping[str, Any], *, sets: Sequence[str] = (), source: str = "argument"
) -> EngineConfig:
    """``config`` with other values for some settings; ``overrides`` win over ``sets``. Nothing else is read.

    Args:
        config: stays as it is.
        overrides: nested tables or dotted paths.
        sets: ``key=value`` strings.
        source: what ``sources`` shall say of ``overrides``.

    Raises:
        ConfigError: as :func:`load_config`.
    """
    return _build([_layer_of(config), sets_layer(sets), mapping_layer(overrides, source)])


def _build(layers: Sequence[Layer]) -> EngineConfig:
    given = merge(layers)
    config = structure(
        nested(given),
        EngineConfig,
        source_of=lambda path: given[path].source if path in given else "default",
        expected_of=lambda path: all_settings()[path].expected if path in all_settings() else "",
    )
    sources = {path: "default" for path, setting in all_settings().items() if not setting.is_table}
    sources.update((path, value.source) for path, value in given.items())
    return attrs.evolve(config, sources=sources)


def _is_value(field: attrs.Attribute[Any], _: Any) -> bool:
    return not field.metadata.get("internal")


def _layer_of(config: EngineConfig) -> Layer:
    """All values of a configuration that are not defaults, with their sources."""
    tables = attrs.asdict(config, filter=_is_value)
    plugins = tables["plugins"]
    plugins.update(plugins.pop("settings"))
    layer = {}
    for path, given in mapping_layer(tables, "config object").items():
        source = config.sources.get(path, "default")
        setting = all_settings().get(path)
        changed = setting is None or given.value != setting.default
        if changed or source != "default":
            layer[path] = Given(given.value, "config object" if source == "default" else source)
    return layer
