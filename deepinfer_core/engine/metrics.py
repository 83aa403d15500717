"""The engine's metrics: what there is, and how a step's share of it is gathered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs

from deepinfer_core.api import MetricKey, MetricSpec, MetricsRecord

if TYPE_CHECKING:
    from .pump import Pump
    from .request import Request
    from .step_timing import StepTiming

LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Seconds."""
STEP = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
HOST = (0.00002, 0.00005, 0.0001, 0.00015, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05)
TOKENS = tuple(float(4**power) for power in range(10))

EXPERT_ROWS = "deepinfer_expert_rows_total"


def _counter(name: str, help: str, *labels: str) -> MetricSpec:
    return MetricSpec(name=f"deepinfer_{name}", kind="counter", help=help, labels=labels)


def _gauge(name: str, help: str) -> MetricSpec:
    return MetricSpec(name=f"deepinfer_{name}", kind="gauge", help=help)


def _histogram(name: str, help: str, buckets: tuple[float, ...]) -> MetricSpec:
    return MetricSpec(name=f"deepinfer_{name}", kind="histogram", help=help, buckets=buckets)


SPECS: Mapping[str, MetricSpec] = {
    spec.name: spec
    for spec in (
        _counter("requests_total", "Requests that arrived."),
        _counter("requests_finished_total", "Completions that ended, by finish reason.", "reason"),
        _counter("request_errors_total", "Completions that ended with an error, by code.", "code"),
        _counter("prompt_tokens_total", "Prompt rows computed, recomputed ones included."),
        _counter("generation_tokens_total", "Output tokens."),
        _counter("prefix_cache_queried_tokens_total", "Tokens that were looked up in the prefix cache."),
        _counter("prefix_cache_hit_tokens_total", "Tokens that the prefix cache held."),
        _counter("preemptions_total", "Running sequences sent back to waiting."),
        _counter("draft_tokens_total", "Draft tokens that were verified."),
        _counter("accepted_tokens_total", "Draft tokens that were accepted."),
        _counter("reference_fallbacks_total", "Operators served by the reference for want of another.", "op"),
        _counter("plugin_errors_total", "Times a plugin failed or raised, by plugin.", "plugin"),
        _counter("steps_total", "Steps committed."),
        _counter("failed_steps_total", "Steps whose device work raised."),
        _counter("dropped_records_total", "Records a sink had no room for, by sink.", "sink"),
        _gauge("running_requests", "Completions that run."),
        _gauge("waiting_requests", "Completions that wait."),
        _gauge("free_blocks", "Free cache blocks of the scarcest group."),
        _gauge("total_blocks", "Cache blocks of the scarcest group."),
        _histogram("time_to_first_token_seconds", "From arrival to the first token.", LATENCY),
        _histogram("time_per_output_token_seconds", "Mean of a request, after its first token.", LATENCY),
        _histogram("queue_time_seconds", "From arrival to the first step.", LATENCY),
        _histogram("request_seconds", "From arrival to the end.", LATENCY),
        _histogram("step_seconds", "From the start of planning, or the step before, to the result.", STEP),
        _histogram("step_host_seconds", "Host time of a step: plan, launch, commit.", HOST),
        _histogram("step_tokens", "Rows of a step.", TOKENS),
        _histogram("prompt_length_tokens", "Prompt lengths.", TOKENS),
        _histogram("output_length_tokens", "Lengths of completions.", TOKENS),
    )
}
"""Every metric but those that a model or plugin adds."""


@attrs.define
class Total:
    """A counter kept elsewhere: ``owner.attribute`` is its total so far, of which ``seen`` was passed on.

    Several with one key add up.
    """

    key: MetricKey
    owner: Any
    attribute: str
    seen: float = 0.0

    def increase(self) -> float:
        now = float(getattr(self.owner, self.attribute))
        added, self.seen = now - self.seen, now
        return added


class MetricsRecorder:
    """Gathers what happens between two flushes into one record for every pump.

    Args:
        totals: what something else counts. gauges: key -> value now. Both are asked at each flush.
    """

    def __init__(
        self,
        pumps: Mapping[str, Pump[MetricsRecord]],
        totals: Sequence[Total] = (),
        gauges: Mapping[MetricKey, Callable[[], float]] = MappingProxyType({}),
    ) -> None:
        self.pumps = pumps
        self._totals = totals
        self._gauges = gauges
        self._counters: dict[MetricKey, float] = {}
        self._observations: dict[MetricKey, list[float]] = {}

    def add(self, name: str, amount: float = 1.0, *labels: str) -> None:
        """Increase the counter ``deepinfer_<name>``."""
        self._increase((f"deepinfer_{name}", *labels) if labels else f"deepinfer_{name}", amount)

    def observe(self, name: str, value: float | None) -> None:
        """A value for the histogram ``deepinfer_<name>``; None is no value."""
        if value is not None:
            self._observations.setdefault(f"deepinfer_{name}", []).append(value)

    def step(self, timing: StepTiming) -> None:
        self.add("steps_total")
        self.add("prompt_tokens_total", timing.prefill)
        self.add("generation_tokens_total", timing.output_tokens)
        self.observe("step_seconds", timing.seconds)
        self.observe("step_host_seconds", timing.host_seconds)
        self.observe("step_tokens", timing.tokens)

    def arrived(self, request: Request) -> None:
        self.add("requests_total")
        self.observe("prompt_length_tokens", len(request.prompt_token_ids))

    def first_token(self, request: Request) -> None:
        self.observe("time_to_first_token_seconds", request.metrics.ttft)
        self.observe("queue_time_seconds", request.metrics.queue_time)

    def finished(self, request: Request) -> None:
        self.observe("time_per_output_token_seconds", request.metrics.tpot)
        self.observe("request_seconds", request.metrics.e2e)

    def flush(self) -> None:
        """Send what was gathered, if anything was."""
        if not self._counters and not self._observations:
            return
        for total in self._totals:
            added = total.increase()
            if added:
                self._increase(total.key, added)
        record = MetricsRecord(
            counters=self._counters,
            gauges={key: read() for key, read in self._gauges.items()},
            observations={key: tuple(values) for key, values in self._observations.items()},
        )
        self._counters, self._observations = {}, {}
        for pump in self.pumps.values():
            pump.put(record)

    def close(self) -> None:
        self.flush()
        for pump in self.pumps.values():
            pump.close()

    def _increase(self, key: MetricKey, amount: float) -> None:
        self._counters[key] = self._counters.get(key, 0.0) + amount


def expert_spec(model: Any) -> MetricSpec | None:
    """Rows by layer and expert, of a model that has ``expert_counts()``; read when a sink exports, never in a step.

    It returns what ``moe.route`` counts for every layer: ``[layers, experts + 1]``, on any device, whose last column
    are rows that had nothing but NaN scores (label ``nan``); or a mapping of a layer's name to its row of that.
    """
    counts = getattr(model, "expert_counts", None)
    if counts is None:
        return None
    return MetricSpec(
        name=EXPERT_ROWS,
        kind="counter",
        help="Rows that were routed to an expert, by layer; expert 'nan': rows without a finite score.",
        labels=("layer", "expert"),
        read=lambda: expert_samples(counts()),
    )


def expert_samples(counts: Any) -> dict[tuple[str, ...], float]:
    """``(layer, expert)`` -> rows."""
    named = counts.items() if isinstance(counts, Mapping) else enumerate(counts.tolist())
    samples: dict[tuple[str, ...], float] = {}
    for layer, row in named:
        *experts, nan = row.tolist() if hasattr(row, "tolist") else row
        samples.update({(str(layer), str(expert)): float(rows) for expert, rows in enumerate(experts)})
        samples[str(layer), "nan"] = float(nan)
    return samples
