"""Environment variables: which setting each one sets, and which are nobody's."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import attrs

from deepinfer_core.api import ConfigError

from .accept import Text
from .layers import Given, Layer, plugin_key
from .original import COUNTERPARTS, why_not
from .settings import ENV_PREFIX, FILE_VARIABLE, all_settings, env_name, group_of, nearest


def environment_layer(environ: Mapping[str, str]) -> Layer:
    """Values of all ``DEEPINFER_*`` variables.

    ``DEEPINFER_<NAME>__<FIELD>`` with a name that is no group of ours is taken for a plugin's setting;
    :func:`check_environment` judges it once plugins are loaded.

    Raises:
        ConfigError: a variable that can be nobody's, or two that set the same thing differently.
    """
    layer: dict[str, Given] = {}
    for name in _ours(environ):
        path = _path_of(name)
        given = Given(_value(name, environ[name]), f"environment {name}")
        other = layer.setdefault(path, given)
        if other.value != given.value:
            raise ConfigError(f"{other.source.split()[-1]} and {name} both set {path}, to different values; unset one")
    return layer


def check_environment(environ: Mapping[str, str], plugin_settings: Mapping[str, type]) -> None:
    """Refuse variables that set nothing.

    Args:
        environ: variables by name; those that do not begin with ``DEEPINFER_`` are ignored.
        plugin_settings: loaded plugin -> its attrs class of settings; plugins without settings are left out.

    Raises:
        ConfigError: an unknown variable, with the nearest valid name.
    """
    theirs = {
        f"plugins.{plugin_key(plugin)}.{field.name.lower()}"
        for plugin, settings in plugin_settings.items()
        for field in attrs.fields(settings)
    }
    for name in _ours(environ):
        path = _path_of(name)
        if path.startswith("plugins.") and path not in all_settings() and path not in theirs:
            raise _unknown(name, [env_name(path.removeprefix("plugins.")) for path in theirs])


def _ours(environ: Mapping[str, str]) -> Iterator[str]:
    return (name for name in sorted(environ) if name.startswith(ENV_PREFIX) and name != FILE_VARIABLE)


def _value(name: str, text: str) -> object:
    return COUNTERPARTS[name].read(text) if name in COUNTERPARTS else Text(text)


def _path_of(name: str) -> str:
    """Dotted path of the setting that a variable sets."""
    for setting in all_settings().values():
        if name in setting.env:
            return setting.path
    if name in COUNTERPARTS:
        return COUNTERPARTS[name].path
    reason = why_not(name)
    if reason is not None:
        raise ConfigError(f"{name}: this variable of the original engine has no counterpart here: {reason}")
    path = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
    first, *rest = path.split(".")
    if first == "ops" and rest:
        return path
    if first == "plugins" and len(rest) == 2:
        return path
    if group_of(first) is None and first not in all_settings() and len(rest) == 1:
        return f"plugins.{path}"
    raise _unknown(name, [])


def _unknown(name: str, more: Collection[str]) -> ConfigError:
    known = [FILE_VARIABLE, *more]
    for setting in all_settings().values():
        known.extend(setting.env)
    near = nearest(name, known) or f"; unset it: settings are written {ENV_PREFIX}GROUP__FIELD"
    return ConfigError(f"unknown environment variable {name}{near}")
