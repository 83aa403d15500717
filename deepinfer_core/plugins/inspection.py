"""What pluggy does not check about a plugin: misspelt hooks, defaults, ordering tricks, missing marks."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from types import FunctionType, UnionType
from typing import Any

import attrs
import pluggy

from deepinfer_core.api import API_VERSION, PluginError, PluginInfo, hookspecs

from .nearest import suggest

_ORDERING = ("wrapper", "hookwrapper", "tryfirst", "trylast")


def new_manager() -> pluggy.PluginManager:
    """A manager that knows every hook of this core."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def hook_arguments(manager: pluggy.PluginManager) -> Mapping[str, tuple[str, ...]]:
    """Hook name -> its arguments, in order."""
    callers = {name: getattr(manager.hook, name) for name in vars(manager.hook) if not name.startswith("_")}
    return {name: tuple(hook.spec.argnames) for name, hook in sorted(callers.items()) if hook.spec is not None}


def hook_record(hook: str) -> type | UnionType | None:
    """The record types a hook returns a sequence of, or None for hooks that return nothing."""
    returned = typing.get_type_hints(getattr(hookspecs, hook))["return"]
    if returned is type(None) or returned is PluginInfo:
        return None
    item: type | UnionType = typing.get_args(returned)[0]
    return item


def record_name(record: type | UnionType) -> str:
    """As errors write it."""
    return (
        record.__name__ if isinstance(record, type) else " or ".join(part.__name__ for part in typing.get_args(record))
    )


def check_implementations(manager: pluggy.PluginManager, plugin: object) -> None:
    """Refuse, before anything is registered, what pluggy would accept silently or reject unclearly.

    Raises:
        PluginError: naming the function and the fix.
    """
    if plugin is None or isinstance(plugin, type):
        raise PluginError(f"the entry point is {plugin!r}; point it at a module or at an object")
    hooks = hook_arguments(manager)
    found = 0
    for attribute in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, attribute)
        if options is None:
            _check_unmarked(plugin, attribute, hooks)
            continue
        hook = options.get("specname") or attribute
        used = [option for option in _ORDERING if options.get(option)]
        if used:
            raise PluginError(f"{attribute}: {', '.join(used)} not allowed: order never decides here, scores do")
        if hook not in hooks:
            if options.get("optionalhook"):
                continue  # the author's word that an older core may lack it
            raise PluginError(f"{attribute}: there is no hook {hook!r}{suggest(hook, hooks)}")
        _check_signature(attribute, getattr(plugin, attribute), hooks[hook])
        found += 1
    if not found:
        raise PluginError(f"{plugin!r} implements no hook; mark functions with @hookimpl of deepinfer_core.api")


def _check_unmarked(plugin: object, attribute: str, hooks: Mapping[str, object]) -> None:
    function = inspect.getattr_static(plugin, attribute, None)
    if attribute in hooks and isinstance(function, FunctionType):
        raise PluginError(f"{attribute}: not marked with @hookimpl, so it would never be called")


def _check_signature(attribute: str, function: Any, arguments: tuple[str, ...]) -> None:
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise PluginError(f"{attribute}: {parameter} is never filled; name the arguments you need")
        if name not in arguments:
            raise PluginError(f"{attribute}: the hook has no argument {name!r}{suggest(name, arguments)}")
        if parameter.default is not parameter.empty:
            raise PluginError(f"{attribute}: argument {name!r} has a default; remove it, the core always passes it")


def check_identity(info: object, name: str) -> PluginInfo:
    """Check the answer of ``deepinfer_plugin`` of the plugin that users call ``name``."""
    if not isinstance(info, PluginInfo):
        raise PluginError(f"deepinfer_plugin returned {info!r}; expected a PluginInfo")
    if info.name != name:
        raise PluginError(f"deepinfer_plugin says name={info.name!r}, the entry point says {name!r}; make them equal")
    major, minor = _api_range(info)
    if major != API_VERSION[0] or minor > API_VERSION[1]:
        core = ".".join(map(str, API_VERSION))
        raise PluginError(f"needs plugin interface {major}.{minor}, this core has {core}; upgrade the older of the two")
    for field in ("needs", "conflicts"):
        value = getattr(info, field)
        if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
            raise PluginError(f"PluginInfo.{field}={value!r}: expected a tuple of plugin names")
    if info.settings is not None:
        _check_settings(info.settings)
    return info


def _api_range(info: PluginInfo) -> tuple[int, int]:
    api: object = info.api
    if isinstance(api, tuple) and len(api) == 2 and all(type(part) is int for part in api):
        return api
    raise PluginError(f"PluginInfo.api={api!r}: expected (major, minor)")


def _check_settings(settings: object) -> None:
    if not isinstance(settings, type) or not attrs.has(settings):
        raise PluginError(f"PluginInfo.settings={settings!r}: expected an attrs class")
    for field in attrs.fields(settings):
        if field.init and field.default is attrs.NOTHING:
            raise PluginError(f"PluginInfo.settings: field {field.name!r} of {settings.__name__} needs a default")
