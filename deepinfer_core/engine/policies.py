"""A scheduling policy by name, outside an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer_core.api import Policy, PolicyInfo
from deepinfer_core.config import load_config, override, plugin_settings
from deepinfer_core.plugins import resolve

from .planning import open_registry
from .policy_open import make_policy


def named_policy(name: str, settings: Mapping[str, Any]) -> Policy:
    """See :func:`deepinfer_core.api.simulation.named_policy`."""
    config = override(load_config(), {**settings, "scheduling.policy": name}, source="the caller")
    registry = open_registry(config)
    plugin, info = resolve(registry, "policy", config.scheduling.policy)
    assert isinstance(info, PolicyInfo)
    kind = registry.plugins[plugin].info.settings
    return make_policy(plugin, info, None if kind is None else plugin_settings(config, plugin, kind))
