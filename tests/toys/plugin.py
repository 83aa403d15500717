"""Declares the toy architectures; loaded through ``plugins.paths``."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_core.api import LazyRef, ModelInfo, PluginInfo, hookimpl


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name="toys", help="Toy models for tests")


@hookimpl
def deepinfer_models() -> Sequence[ModelInfo]:
    names = ("Count", "Const", "Flat", "PrefixHash", "Script")
    return [ModelInfo(architectures=(f"Toy{name}",), definition=LazyRef(f"toys.models:{name}")) for name in names]
