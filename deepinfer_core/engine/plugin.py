"""Declares what the engine itself brings: the first-come-first-served policy."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_core.api import LazyRef, PluginInfo, PolicyInfo, hookimpl


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name="engine", help="First-come-first-served scheduling")


@hookimpl
def deepinfer_scheduling() -> Sequence[PolicyInfo]:
    return [
        PolicyInfo(
            name="fcfs",
            help="First come, first served; the newest arrival is preempted first",
            factory=LazyRef("deepinfer_core.engine.fcfs:FirstComeFirstServed"),
        )
    ]
