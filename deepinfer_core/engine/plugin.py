"""Declares what the engine itself brings: the first-come-first-served policy and the Prometheus sink."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from deepinfer_core.api import LazyRef, MetricsSinkInfo, PluginInfo, PolicyInfo, hookimpl


@attrs.frozen(kw_only=True)
class EngineSettings:
    """Settings ``plugins.engine.*`` of the sink ``prometheus``: where its text goes besides ``LLM.metrics_text()``.

    Attributes:
        prometheus_file: path, replaced as a whole; None for no file.
        prometheus_port: serve ``/metrics`` there; 0 takes a free one; None for none.
        prometheus_host: address to listen on; by default only this machine can ask.
    """

    prometheus_file: str | None = None
    prometheus_port: int | None = attrs.field(
        default=None,
        validator=attrs.validators.optional([attrs.validators.ge(0), attrs.validators.le(65535)]),
    )
    prometheus_host: str = "127.0.0.1"


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(
        name="engine",
        api=(1, 1),
        help="First-come-first-served scheduling, Prometheus metrics",
        settings=EngineSettings,
    )


@hookimpl
def deepinfer_metrics() -> Sequence[MetricsSinkInfo]:
    return [
        MetricsSinkInfo(
            name="prometheus",
            help="Prometheus text: LLM.metrics_text(), a file, or a port",
            factory=LazyRef("deepinfer_core.engine.prometheus:PrometheusSink"),
        )
    ]


@hookimpl
def deepinfer_scheduling() -> Sequence[PolicyInfo]:
    return [
        PolicyInfo(
            name="fcfs",
            help="First come, first served; the newest arrival is preempted first",
            factory=LazyRef("deepinfer_core.engine.fcfs:FirstComeFirstServed"),
        )
    ]
