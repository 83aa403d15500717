"""The metrics sink ``prometheus``: text in Prometheus' format, in a file, over HTTP, or asked for in Python."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import prometheus_client as client
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from deepinfer_core.api import ConfigError, MetricKey, MetricSpec, MetricsRecord

from .plugin import EngineSettings

FILE_SECONDS = 1.0
"""The file is not rewritten more often, while records come."""


class PrometheusSink:
    """Keeps every metric in a registry of its own and exports that.

    Args:
        settings: ``prometheus_file`` is replaced as a whole, at most once a second and when the engine closes;
            ``prometheus_port`` answers ``GET /metrics`` on ``prometheus_host``.

    Raises:
        ConfigError: the file's folder does not exist.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.registry = _Registry()
        self._settings = settings
        self._metrics: dict[str, Any] = {}
        self._written = 0.0
        self._server: tuple[Any, threading.Thread] | None = None
        file = settings.prometheus_file
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise ConfigError(f"plugins.engine.prometheus_file = {file!r}: its folder does not exist")

    def start(self, specs: Mapping[str, MetricSpec]) -> None:
        for spec in specs.values():
            if spec.read is not None:
                self.registry.register(_ReadMetric(spec))
            elif spec.kind == "histogram":
                self._metrics[spec.name] = client.Histogram(
                    spec.name, spec.help, spec.labels, buckets=spec.buckets, registry=self.registry
                )
            else:
                kind = client.Counter if spec.kind == "counter" else client.Gauge
                self._metrics[spec.name] = kind(spec.name, spec.help, spec.labels, registry=self.registry)
        self._serve()
        self._write()

    def emit(self, record: MetricsRecord) -> None:
        for key, amount in record.counters.items():
            self._metric(key).inc(amount)
        for key, value in record.gauges.items():
            self._metric(key).set(value)
        for key, values in record.observations.items():
            histogram = self._metric(key)
            for value in values:
                histogram.observe(value)
        if time.monotonic() - self._written >= FILE_SECONDS:
            self._write()

    def close(self) -> None:
        self._write()
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()

    @property
    def port(self) -> int | None:
        """Where the text is served; None when it is not."""
        return None if self._server is None else int(self._server[0].server_port)

    def text(self) -> str:
        """All metrics, in the text format."""
        return client.generate_latest(self.registry).decode()

    def _metric(self, key: MetricKey) -> Any:
        if isinstance(key, str):
            return self._metrics[key]
        return self._metrics[key[0]].labels(*key[1:])

    def _write(self) -> None:
        if self._settings.prometheus_file is not None:
            client.write_to_textfile(self._settings.prometheus_file, self.registry)
        self._written = time.monotonic()

    def _serve(self) -> None:
        port, host = self._settings.prometheus_port, self._settings.prometheus_host
        if port is None:
            return
        try:
            self._server = client.start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise ConfigError(f"plugins.engine.prometheus_port = {port}: {host}: {error.strerror}") from None


class _Registry(client.CollectorRegistry):
    """Leaves out the ``_created`` samples, which no text-format scraper uses and which double the page."""

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class _ReadMetric:
    """A metric whose values are asked for when somebody looks."""

    def __init__(self, spec: MetricSpec) -> None:
        self._spec = spec

    def describe(self) -> Iterable[Metric]:
        return [self._family()]

    def collect(self) -> Iterable[Metric]:
        assert self._spec.read is not None
        family = self._family()
        for labels, value in self._spec.read().items():
            family.add_metric(labels, value)
        return [family]

    def _family(self) -> Any:
        kind = CounterMetricFamily if self._spec.kind == "counter" else GaugeMetricFamily
        return kind(self._spec.name, self._spec.help, labels=self._spec.labels)
