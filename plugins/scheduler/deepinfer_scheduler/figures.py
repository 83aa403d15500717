"""The figures of a simulation."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from deepinfer_core.api.simulation import SimulatedResult, SimulationTotals


@attrs.frozen(kw_only=True)
class Targets:
    """What a request must meet to count as goodput; its own targets win. Seconds."""

    ttft: float = 2.0
    tpot: float = 0.1


class Collector:
    """Takes results as they come, eight bytes for each number: a million requests are 40 MB."""

    def __init__(self, targets: Targets) -> None:
        self.targets = targets
        self._queue, self._ttft, self._tpot = array("d"), array("d"), array("d")
        self._speed: dict[str, list[float]] = {}
        self._good = 0
        self.requests = self.refused = 0
        self.start, self.end = float("inf"), 0.0

    def add(self, result: SimulatedResult) -> None:
        self.requests += 1
        self.start, self.end = min(self.start, result.request.arrival), max(self.end, result.finished)
        if result.refused is not None:
            self.refused += 1
            return
        queue, ttft, tpot = result.queue_time, result.ttft, result.tpot
        assert queue is not None
        assert ttft is not None
        self._queue.append(queue)
        self._ttft.append(ttft)
        if tpot is not None:
            self._tpot.append(tpot)
        self._good += self._is_good(result, ttft, tpot)
        speed = self._speed.setdefault(result.request.tenant, [0.0, 0.0])
        speed[0] += result.output
        speed[1] += result.finished - result.request.arrival

    def _is_good(self, result: SimulatedResult, ttft: float, tpot: float | None) -> bool:
        request = result.request
        in_time = ttft <= (self.targets.ttft if request.ttft_target is None else request.ttft_target)
        fast = tpot is None or tpot <= (self.targets.tpot if request.tpot_target is None else request.tpot_target)
        return in_time and fast and (request.deadline is None or result.finished <= request.deadline)

    def figures(self, totals: SimulationTotals, replicas: int) -> dict[str, Any]:
        """Plain data; times in milliseconds, null where there is nothing to measure.

        ``fairness`` is Jain's index of the tenants' speeds, output tokens for each second between arrival and end:
        1 when all are equal, 1/n when one has everything. ``utilisation``: the share of the time in steps.
        """
        seconds = self.end - self.start if self.requests else 0.0
        tpot = _spread(self._tpot)
        return {
            "requests": self.requests,
            "refused": self.refused,
            "seconds": seconds,
            "ttft_ms": _spread(self._ttft),
            "tpot_ms": tpot,
            "queue_ms": _spread(self._queue),
            "output_tokens_per_second": _per(totals.output_tokens, seconds),
            "tokens_per_second_per_user": None if tpot is None or not tpot["mean"] else 1e3 / tpot["mean"],
            "requests_per_second": _per(self.requests - self.refused, seconds),
            "goodput_per_second": _per(self._good, seconds),
            "goodput_share": _per(self._good, self.requests),
            "cache_hit_rate": _per(totals.cached, totals.queried),
            "preemptions": totals.preemptions,
            "fairness": _jain({name: tokens / life for name, (tokens, life) in self._speed.items() if life > 0}),
            "utilisation": _per(totals.busy, seconds * replicas),
            "steps": totals.steps,
            "policy_failures": totals.policy_failures,
        }


def _spread(values: array[float]) -> dict[str, float] | None:
    if not values:
        return None
    known = np.frombuffer(values, np.float64) * 1e3
    p50, p99 = np.percentile(known, (50, 99)).tolist()
    return {"mean": float(known.mean()), "p50": p50, "p99": p99}


def _per(amount: float, whole: float) -> float | None:
    return amount / whole if whole else None


def _jain(speeds: Mapping[str, float]) -> float | None:
    values = np.array(list(speeds.values()))
    return float(values.sum() ** 2 / (len(values) * (values**2).sum())) if len(values) and values.any() else None
