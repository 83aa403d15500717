"""Metrics: named counters, gauges and histograms, given to every sink after each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

import attrs

from .provider import LazyRef

MetricKey = str | tuple[str, ...]
"""A metric's name, or ``(name, value of each label, ...)`` for one that has labels."""


@attrs.frozen(kw_only=True)
class MetricSpec:
    """A metric's name (``deepinfer_...``, base units), meaning, and buckets for histograms.

    Attributes:
        buckets: upper bounds, ascending, without infinity.
        labels: names of its labels. read: for a metric that no record carries, because it costs something to know:
            called when a sink exports, from any thread; label values -> value now.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    buckets: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()
    read: Callable[[], Mapping[tuple[str, ...], float]] | None = None


@attrs.frozen(kw_only=True)
class MetricsRecord:
    """What one step adds.

    Attributes:
        counters: key -> increase. gauges: key -> value now. observations: key -> values seen.
    """

    counters: Mapping[MetricKey, float]
    gauges: Mapping[MetricKey, float]
    observations: Mapping[MetricKey, tuple[float, ...]]


class MetricsSink(Protocol):
    """Receives records off the step's path, in a thread of its own.

    A sink that raises three times gets no more, with a log line. One that blocks delays nobody: records that it has
    no room for are dropped and counted.
    """

    def start(self, specs: Mapping[str, MetricSpec]) -> None:
        """Called once, before the first record, with every metric that may appear. Raising stops the engine."""
        ...

    def emit(self, record: MetricsRecord) -> None: ...

    def close(self) -> None:
        """Called once, after the last record, also when the sink was disabled."""
        ...


@attrs.frozen(kw_only=True)
class MetricsSinkInfo:
    """Declared by ``deepinfer_metrics``: a sink users name in ``logging.metrics``.

    ``factory`` is called with the plugin's settings (or None) and returns a :class:`MetricsSink`.
    """

    name: str
    help: str
    factory: LazyRef
