"""Metrics: named counters, gauges and histograms, given to every sink after each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import attrs

from .provider import LazyRef


@attrs.frozen(kw_only=True)
class MetricSpec:
    """A metric's name (``deepinfer_...``, base units), meaning, and buckets for histograms."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    buckets: tuple[float, ...] = ()


@attrs.frozen(kw_only=True)
class MetricsRecord:
    """What one step adds.

    Attributes:
        counters: name -> increase. gauges: name -> value now. observations: name -> values seen.
    """

    counters: Mapping[str, float]
    gauges: Mapping[str, float]
    observations: Mapping[str, tuple[float, ...]]


class MetricsSink(Protocol):
    """Receives records off the step's path. A sink that raises is disabled after three times, with a log line."""

    def start(self, specs: Mapping[str, MetricSpec]) -> None:
        """Called once, before the first record, with every metric that may appear."""
        ...

    def emit(self, record: MetricsRecord) -> None: ...

    def close(self) -> None: ...


@attrs.frozen(kw_only=True)
class MetricsSinkInfo:
    """Declared by ``deepinfer_metrics``; ``factory`` takes no arguments and returns a :class:`MetricsSink`."""

    name: str
    help: str
    factory: LazyRef
