"""In the child: import one plugin, register it, ask every hook that declares. Needs no torch and no device."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import attrs

from deepinfer_core.api import ConfigError, DeviceInfo, PluginError, PluginInfo, ProbeEnv
from deepinfer_core.config import load_config, plugin_settings
from deepinfer_core.config.layers import plugin_key
from deepinfer_core.config.settings import env_name
from deepinfer_core.plugins import PROVIDER_HOOKS, Registry, load_plugins
from deepinfer_core.plugins.discovery import PATH_DISTRIBUTION
from deepinfer_core.plugins.inspection import hook_arguments, hook_record
from deepinfer_core.plugins.loader import import_entry_point, import_path

from .child import Say
from .watch import Watch

HEAVY = ("torch", "transformers", "tensorflow", "jax", "scipy", "pandas", "matplotlib")
"""Packages that take long to import, and that no declaration needs."""


def declare(question: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Facts about the plugin ``name`` at ``entry_point``; without a ``pin`` that is an item of ``plugins.paths``.

    ``failure`` says why it cannot be loaded; other facts are then those that were known by then. ``name``: its own.
    """
    facts: dict[str, Any] = {
        "name": question["name"],
        "failure": "",
        "devices": [],
        "absent": [],
        "hook_failures": [],
        "settings": [],
        "bad_settings": [],
    }
    watch = Watch()
    say("import")
    known = set(sys.modules)
    start = time.process_time()
    plugin, facts["failure"] = _import(question)
    facts["import_seconds"] = time.process_time() - start
    facts["hook_seconds"], facts["hooks"] = 0.0, 0
    if not facts["failure"]:
        say("register")
        start = time.process_time()
        facts.update(_asked(question, plugin, say))
        facts["hook_seconds"] = time.process_time() - start
    facts["heavy"] = [name for name in HEAVY if name in sys.modules and name not in known]
    facts["opened"] = watch.stop()
    return facts


def _import(question: Mapping[str, Any]) -> tuple[Any, str]:
    load = import_path if question["pin"] is None else import_entry_point
    try:
        return load(question["entry_point"]), ""
    except BaseException as error:  # SystemExit included
        return None, _line(error)


def _asked(question: Mapping[str, Any], plugin: Any, say: Say) -> dict[str, Any]:
    name, pin = question["name"], question["pin"]
    try:
        if pin is None:
            registry = load_plugins(allow=_needs(plugin), files=[question["entry_point"]])
            records = (loaded.record for loaded in registry.plugins.values())
            name = next(record.name for record in records if record.distribution == PATH_DISTRIBUTION)
        else:
            registry = load_plugins(allow=[pin, *_needs(plugin)])
    except PluginError as error:
        return {"failure": str(error)}
    loaded = registry.plugins.get(name)
    if loaded is None:
        return {"failure": "; ".join(str(failure) for failure in registry.failures if failure.name == name)}
    say("probe")
    devices, absent = [], []
    for owner, info in _collect(registry, "deepinfer_probe", env=ProbeEnv(environ=dict(os.environ))):
        if owner == name and isinstance(info, DeviceInfo):
            devices.append({"backend": info.backend, "arch": info.arch, "evidence": info.evidence, "type": info.type})
        elif owner == name:
            absent.append({"backend": info.backend, "reason": info.reason, "fix": info.fix})
    say("hooks")
    for device in _probed(registry, name):
        for hook in PROVIDER_HOOKS:
            _collect(registry, hook, device=device)
    for hook, arguments in hook_arguments(registry.manager).items():
        if not arguments and hook_record(hook) is not None:
            _collect(registry, hook)
    settings = loaded.info.settings
    return {
        "name": name,
        "bad_settings": _bad_settings(name, settings, question["file"]),
        "devices": devices,
        "absent": absent,
        "archs": list(loaded.info.archs),
        "hooks": sum(name in registry.implementers(hook) for hook in vars(registry.manager.hook) if hook[0] != "_"),
        "hook_failures": [failure.cause for failure in registry.failures if failure.name == name],
        "settings": [field.name for field in attrs.fields(settings)] if settings is not None else [],
    }


def _collect(registry: Registry, hook: str, **arguments: Any) -> list[tuple[str, Any]]:
    """A hook's answers; one that the plugin fails is in the registry's failures already, and costs no more here."""
    try:
        return registry.collect(hook, **arguments)
    except PluginError:
        return []


def _probed(registry: Registry, name: str) -> list[DeviceInfo]:
    found = _collect(registry, "deepinfer_probe", env=ProbeEnv(environ=dict(os.environ)))
    return [info for owner, info in found if owner == name and isinstance(info, DeviceInfo)]


def _bad_settings(name: str, settings: type | None, file: str | None) -> list[tuple[str, str]]:
    """``(variable, what is wrong with its value)``, and one with ``""`` for the file. Each is judged alone."""
    if settings is None:
        return []
    bad = []
    names = [env_name(f"{plugin_key(name)}.{field.name}") for field in attrs.fields(settings)]
    for variable in (*(name for name in names if name in os.environ), ""):
        environ = {variable: os.environ[variable]} if variable else {}
        try:
            plugin_settings(load_config(environ=environ, file=os.devnull if variable else file), name, settings)
        except ConfigError as error:
            bad.append((variable, str(error)))
    return bad


def _needs(plugin: Any) -> tuple[str, ...]:
    """Plugins that this one says it needs; whether it says it rightly is the loader's question."""
    try:
        info = plugin.deepinfer_plugin()
    except BaseException:
        return ()
    needs = info.needs if isinstance(info, PluginInfo) else ()
    return tuple(need for need in needs if isinstance(need, str))


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
