"""A plugin for the tests of observability: sinks that misbehave, a policy that raises, a drafter that half errs."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from exposition import read_exposition
from prometheus_client.parser import text_string_to_metric_families

from deepinfer_core.api import (
    Draft,
    DrafterInfo,
    DraftRow,
    LazyRef,
    MetricKey,
    MetricSpec,
    MetricsRecord,
    MetricsSinkInfo,
    PluginInfo,
    PolicyInfo,
    SchedulingEvent,
    Verified,
    hookimpl,
)
from deepinfer_core.engine.fcfs import FirstComeFirstServed

PATHS = ("toys.plugin", "metrics_support")
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class ListSink:
    """Keeps what it gets. The newest one is ``ListSink.newest``."""

    newest: ListSink

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.specs: Mapping[str, MetricSpec] = {}
        self.records: list[MetricsRecord] = []
        self.threads: set[int] = set()
        self.closed = 0
        type(self).newest = self

    def start(self, specs: Mapping[str, MetricSpec]) -> None:
        self.specs = specs

    def emit(self, record: MetricsRecord) -> None:
        self.threads.add(threading.get_ident())
        self.records.append(record)

    def close(self) -> None:
        self.closed += 1

    def total(self, key: MetricKey) -> float:
        return sum(record.counters.get(key, 0.0) for record in self.records)


class BlockedSink(ListSink):
    """Takes nothing until ``release`` is set."""

    release = threading.Event()

    def emit(self, record: MetricsRecord) -> None:
        self.release.wait(30)
        super().emit(record)


class RaisingSink(ListSink):
    def emit(self, record: MetricsRecord) -> None:
        super().emit(record)
        raise OSError("the wire is cut")


class RefusingSink(ListSink):
    def start(self, specs: Mapping[str, MetricSpec]) -> None:
        raise OSError("no such host")


class LeavingSink(ListSink):
    def start(self, specs: Mapping[str, MetricSpec]) -> None:
        raise SystemExit(3)


class BrokenFactory:
    def __init__(self, settings: Any) -> None:
        raise ValueError("cannot be made")


class LoudPolicy(FirstComeFirstServed):
    """Raises whenever it is told something, and counts how often."""

    told = 0

    def on_event(self, event: SchedulingEvent) -> None:
        type(self).told += 1
        raise RuntimeError("I do not want to know")


class HalfRight:
    """For COUNT: drafts two tokens, the second one wrong."""

    def __init__(self, settings: Any) -> None:
        self.results: list[Verified] = []
        type(self).newest = self

    newest: HalfRight

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [Draft(tokens=[(int(row.tokens[-1]) + 1) % 64, 0][: row.max_drafts]) for row in rows]

    def verified(self, results: Sequence[Verified]) -> None:
        self.results += results

    def forget(self, request_id: str, child: int) -> None:
        return None


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name="watchers", help="for tests")


@hookimpl
def deepinfer_metrics() -> Sequence[MetricsSinkInfo]:
    sinks = {
        "list": "ListSink",
        "blocked": "BlockedSink",
        "raising": "RaisingSink",
        "refusing": "RefusingSink",
        "leaving": "LeavingSink",
        "broken": "BrokenFactory",
    }
    return [
        MetricsSinkInfo(name=name, help="for tests", factory=LazyRef(f"metrics_support:{target}"))
        for name, target in sinks.items()
    ]


@hookimpl
def deepinfer_scheduling() -> Sequence[PolicyInfo]:
    return [PolicyInfo(name="loud", help="for tests", factory=LazyRef("metrics_support:LoudPolicy"))]


@hookimpl
def deepinfer_speculation() -> Sequence[DrafterInfo]:
    return [DrafterInfo(name="half", help="for tests", factory=LazyRef("metrics_support:HalfRight"))]


def samples(text: str) -> Samples:
    """Prometheus text as (name, sorted labels) -> value, read by the client library and by the strict reader alike."""
    theirs = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    strict: Samples = {}
    for family in read_exposition(text).values():
        strict |= family.samples
    assert strict == theirs
    return strict


def value(found: Samples, name: str, **labels: str) -> float:
    return found[f"deepinfer_{name}", tuple(sorted(labels.items()))]
