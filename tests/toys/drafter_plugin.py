"""Declares the toy drafters; loaded through ``plugins.paths``, settled through ``plugins.drafter_plugin``."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_core.api import DrafterInfo, LazyRef, PluginInfo, hookimpl

from .drafters import DrafterSettings

DRAFTERS = {
    "toy": "ToyDrafter",
    "silent": "Silent",
    "early": "Early",
    "outside": "Outside",
    "excessive": "Excessive",
    "varying": "Varying",
    "raising": "Raising",
    "garbage": "Garbage",
}


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name="drafter_plugin", help="Toy drafters for tests", settings=DrafterSettings)


@hookimpl
def deepinfer_speculation() -> Sequence[DrafterInfo]:
    return [
        DrafterInfo(name=name, help=f"{kind} of the tests", factory=LazyRef(f"toys.drafters:{kind}"))
        for name, kind in DRAFTERS.items()
    ]
