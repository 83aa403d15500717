"""Connects an engine to the sinks and the trace file that its configuration names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs
import structlog

from deepinfer_core.api import (
    ConfigError,
    MetricKey,
    MetricSpec,
    MetricsRecord,
    MetricsSink,
)
from deepinfer_core.config import plugin_settings
from deepinfer_core.plugins import blamed, resolve

from .metrics import SPECS, MetricsRecorder, Total, expert_spec
from .observer import Observer
from .planner import Planner
from .planning import PlannedEngine
from .pump import Pump
from .speculation import Speculator
from .trace_file import TraceHeader
from .trace_recorder import TraceRecorder

T = TypeVar("T")
log = structlog.get_logger("deepinfer.engine")


@attrs.frozen
class OpenSink:
    """A sink that was named, and whose plugin it is."""

    plugin: str
    sink: MetricsSink


def open_sinks(planned: PlannedEngine) -> dict[str, OpenSink]:
    """The sinks of ``logging.metrics``, made but not started, by the name they were asked for.

    Raises:
        PluginError: nobody has such a sink, or it cannot be made.
        ConfigError: ``logging.trace_file`` lies nowhere, or there is a place for Prometheus text and no such sink.
    """
    trace = planned.config.logging.trace_file
    if trace is not None and not Path(trace).absolute().parent.is_dir():
        raise ConfigError(f"logging.trace_file = {trace!r}: its folder does not exist")
    names = dict.fromkeys(planned.config.logging.metrics)
    if not any(name.rpartition(":")[2] == "prometheus" for name in names):
        for name, value in planned.config.plugins.settings.get("engine", {}).items():
            if name in ("prometheus_file", "prometheus_port"):
                raise ConfigError(
                    f"plugins.engine.{name} = {value}: nothing would write there; set logging.metrics = prometheus too"
                )
    return {name: _open(planned, name) for name in names}


def connect(
    observer: Observer,
    planned: PlannedEngine,
    sinks: Mapping[str, OpenSink],
    *,
    planner: Planner,
    speculator: Speculator | None,
    model: Any,
) -> None:
    """Start sinks and trace, and log that the engine starts.

    Raises:
        PluginError: a sink refuses to start. ConfigError: the trace file cannot be written.
    """
    observer.policy_plugin = planned.plan.policy.partition(":")[0]
    if planned.config.logging.trace_file is not None:
        observer.trace = TraceRecorder(planned.config.logging.trace_file, _header(planned, planner), observer.clock)
    if sinks:
        observer.metrics = _start(planned, sinks, planner, speculator, model)
        observer.flush()
    _log_start(planned, planner)


def exported_text(recorder: MetricsRecorder | None, sinks: Mapping[str, OpenSink], timeout: float = 1.0) -> str:
    """What the first sink that can show its metrics as text holds now.

    Waits at most ``timeout`` seconds for what the sink has not yet received.

    Raises:
        ConfigError: no sink can.
    """
    for name, opened in sinks.items():
        text = getattr(opened.sink, "text", None)
        if recorder is not None and text is not None:
            recorder.pumps[name].flush(timeout)
            return str(text())
    raise ConfigError(
        f"logging.metrics = {list(sinks)!r}: expected a sink that shows its metrics as text; add 'prometheus'"
    )


def _open(planned: PlannedEngine, name: str) -> OpenSink:
    plugin, info = resolve(planned.registry, "sink", name)
    kind = planned.registry.plugins[plugin].info.settings
    settings = None if kind is None else plugin_settings(planned.config, plugin, kind)
    return OpenSink(plugin, _guarded(name, plugin, lambda: info.factory.load()(settings)))


def _start(
    planned: PlannedEngine,
    sinks: Mapping[str, OpenSink],
    planner: Planner,
    speculator: Speculator | None,
    model: Any,
) -> MetricsRecorder:
    experts = expert_spec(model)
    specs: dict[str, MetricSpec] = {**SPECS, **({} if experts is None else {experts.name: experts})}
    pumps: dict[str, Pump[MetricsRecord]] = {}
    for name, opened in sinks.items():
        start = opened.sink.start
        _guarded(name, opened.plugin, lambda start=start: start(specs))  # type: ignore[misc]
        pumps[name] = Pump(f"sink {name}", opened.sink.emit, opened.sink.close)
    recorder = MetricsRecorder(pumps, _totals(planned, sinks, pumps, planner, speculator), _gauges(planner))
    for choice in planned.plan.choices:
        if choice.source == "reference":
            recorder.add("reference_fallbacks_total", 1.0, choice.op)
    for failure in planned.registry.failures:
        recorder.add("plugin_errors_total", 1.0, failure.name)
    return recorder


def _totals(
    planned: PlannedEngine,
    sinks: Mapping[str, OpenSink],
    pumps: Mapping[str, Pump[MetricsRecord]],
    planner: Planner,
    speculator: Speculator | None,
) -> list[Total]:
    policy = planned.plan.policy.partition(":")[0]
    totals = [
        Total("deepinfer_preemptions_total", planner.preemption, "count"),
        Total(("deepinfer_plugin_errors_total", policy), planner.guard, "failures"),
    ]
    for name, pump in pumps.items():
        totals.append(Total(("deepinfer_dropped_records_total", name), pump, "dropped"))
        totals.append(Total(("deepinfer_plugin_errors_total", sinks[name].plugin), pump, "failures"))
    if speculator is not None and planned.plan.drafter is not None:
        drafter = planned.plan.drafter.partition(":")[0]
        totals.append(Total("deepinfer_draft_tokens_total", speculator, "proposed"))
        totals.append(Total("deepinfer_accepted_tokens_total", speculator, "accepted"))
        totals.append(Total(("deepinfer_plugin_errors_total", drafter), speculator, "failures"))
    return totals


def _gauges(planner: Planner) -> dict[MetricKey, Callable[[], float]]:
    return {
        "deepinfer_running_requests": lambda: len(planner.slots.running),
        "deepinfer_waiting_requests": lambda: len(planner.waiting),
        "deepinfer_free_blocks": lambda: planner.cache.free_blocks,
        "deepinfer_total_blocks": lambda: planner.cache.total_blocks,
    }


def _header(planned: PlannedEngine, planner: Planner) -> TraceHeader:
    return TraceHeader(
        block_size=planner.cache.block_size,
        max_batch_tokens=planner.max_batch_tokens,
        max_running=planner.slots.slots,
        num_blocks={name: group.pool.num_usable for name, group in planner.cache.groups.items()},
        model=planned.spec.architecture,
        policy=planned.plan.policy,
    )


def _log_start(planned: PlannedEngine, planner: Planner) -> None:
    plan = planned.plan
    for objection in planned.objections:
        log.warning("plan objection", text=objection)
    log.info(
        "engine started",
        model=planned.spec.architecture,
        accelerator=plan.accelerator,
        dtype=planned.spec.dtype,
        policy=plan.policy,
        drafter=plan.drafter,
        plugins=[record.name for record in plan.plugins],
        features=list(plan.features),
        operators=len(plan.choices),
        fallbacks=sum(choice.source == "reference" for choice in plan.choices),
        max_running=planner.slots.slots,
        max_batch_tokens=planner.max_batch_tokens,
        blocks=planner.cache.total_blocks,
        block_size=planner.cache.block_size,
    )


def _guarded(sink: str, plugin: str, make: Callable[[], T]) -> T:
    return blamed(f"metrics sink {sink!r} of plugin {plugin!r}", make)
