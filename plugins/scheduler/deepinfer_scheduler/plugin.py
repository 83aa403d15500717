"""What this plugin declares."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_core.api import CommandInfo, LazyRef, PluginInfo, PolicyInfo, hookimpl

from .settings import SchedulerSettings

_POLICIES = (
    ("priority", "Priority", "Higher priority first; waiting raises it"),
    ("deadline", "Deadline", "Earliest deadline first, by deadline_ms and ttft_target_ms"),
    ("fair", "Fair", "Equal service for every tenant, counted in tokens"),
    ("cache_aware", "CacheAware", "Longest cached prefix first"),
    ("shortest_first", "ShortestFirst", "Least work first, by prompt and predicted output"),
    ("latency", "Latency", "Prompt chunks just large enough for decoding to keep its time per token"),
    ("throughput", "Throughput", "Most decode rows for the least prompt work; takes no more than fits the cache"),
)


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name="scheduler", help="Scheduling policies and their simulator", settings=SchedulerSettings)


@hookimpl
def deepinfer_scheduling() -> Sequence[PolicyInfo]:
    return [
        PolicyInfo(name=name, help=help, factory=LazyRef(f"deepinfer_scheduler.policies.{name}:{target}"))
        for name, target, help in _POLICIES
    ]


@hookimpl
def deepinfer_commands() -> Sequence[CommandInfo]:
    return [
        CommandInfo(
            name="simulate",
            help="Compare scheduling policies on a trace, without a model.",
            command=LazyRef("deepinfer_scheduler.commands.simulate:simulate"),
        ),
        CommandInfo(
            name="profile-steps",
            help="Measure a model's steps and write the cost table for `simulate`.",
            command=LazyRef("deepinfer_scheduler.commands.profile_steps:profile_steps"),
        ),
        CommandInfo(
            name="idle-report",
            help="Where the device idled between steps, and why requests waited, from `bench --timeline`.",
            command=LazyRef("deepinfer_scheduler.commands.idle_report:idle_report"),
        ),
    ]
