"""Things users name: policies, architectures, metrics sinks, commands; and who may claim a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs

from deepinfer_core.api import PluginError

from .nearest import suggest
from .registry import Registry

Kind = Literal["constraint", "drafter", "stage", "policy", "architecture", "sink", "command"]


@attrs.frozen
class _Claim:
    """Which hook declares a kind, under which names, and the setting that picks one of two, if there is one."""

    hook: str
    names: Callable[[Any], tuple[str, ...]]
    setting: str = ""


_CLAIMS: Mapping[Kind, _Claim] = {
    "policy": _Claim("deepinfer_scheduling", lambda item: (item.name,), 'scheduling.policy = "{pin}"'),
    "architecture": _Claim("deepinfer_models", lambda item: item.architectures),
    "stage": _Claim("deepinfer_sampling_stages", lambda item: tuple({item.name, *item.arguments})),
    "constraint": _Claim("deepinfer_constraints", lambda item: (item.name,), 'structured_outputs.backend = "{pin}"'),
    "drafter": _Claim("deepinfer_speculation", lambda item: (item.name,), 'speculation.method = "{pin}"'),
    "sink": _Claim("deepinfer_metrics", lambda item: (item.name,), 'logging.metrics = ["{pin}"]'),
    "command": _Claim("deepinfer_commands", lambda item: (item.name,)),
}


def claimed(registry: Registry, kind: Kind) -> dict[str, list[tuple[str, Any]]]:
    """Name -> ``[(plugin, record), ...]`` of every plugin that claims it, sorted by name."""
    claim = _CLAIMS[kind]
    found: dict[str, list[tuple[str, Any]]] = {}
    for plugin, item in registry.collect(claim.hook):
        for name in claim.names(item):
            found.setdefault(name, []).append((plugin, item))
    return dict(sorted(found.items()))


def resolve(registry: Registry, kind: Kind, wanted: str) -> tuple[str, Any]:
    """The plugin and record that ``wanted`` means: a name, or ``plugin:name`` where two plugins share it.

    Raises:
        PluginError: nobody claims the name, or two do and none is pinned.
    """
    plugin, _, name = wanted.rpartition(":")
    names = claimed(registry, kind)
    holders = [(holder, item) for holder, item in names.get(name, []) if plugin in ("", holder)]
    if not holders:
        setting = _CLAIMS[kind].setting.partition(" = ")[0]
        field = f"{setting} = {wanted!r}: " if setting else ""
        raise PluginError(f"{field}no loaded plugin has {kind} {wanted!r}{suggest(name, names)}")
    if len(holders) > 1:
        plugins = sorted(holder for holder, _ in holders)
        setting = _CLAIMS[kind].setting or "--no-plugin {other}"
        lines = " or ".join(setting.format(pin=f"{holder}:{name}", other=holder) for holder in plugins)
        raise PluginError(f"{kind} {name!r} is claimed by {' and '.join(plugins)}; write one of: {lines}")
    return holders[0]
