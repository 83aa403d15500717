"""Measures what steps of a real engine cost, over a grid of prompt rows, decode rows and contexts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import deepinfer_core
from deepinfer_core.api.simulation import StepProfile, StepSample, StepShape
from deepinfer_core.config import load_config, override

from .assemble import Engine
from .open_engine import open_engine
from .profile_grid import Asked, Point, grid
from .sampling_params import SamplingParams
from .step_plan import StepPlan
from .step_shape import step_shape
from .step_timing import StepTiming

LEAST_POINTS = 8
"""Run however long they take, for without them there is no table: prompts of up to 64 tokens, and one that decodes."""
LATE = 4
"""Steps of the others before a request that comes late."""


def profile_steps(
    settings: Mapping[str, Any],
    *,
    rounds: int,
    progress: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    seconds: float | None = None,
    share: Callable[[float], None] | None = None,
) -> StepProfile:
    """See :func:`deepinfer_core.api.simulation.profile_steps`."""
    config = override(load_config(), {"logging.progress": False, **settings}, source="profile-steps")
    engine = open_engine(config, clock=clock)
    try:
        profiler = _Profiler(engine, rounds, seconds, progress, share or (lambda done: None))
        samples = profiler.run()
        plan = engine.planned.plan
        facts = {
            "model": engine.planned.spec.architecture,
            "accelerator": plan.accelerator,
            "dtype": engine.planned.spec.dtype,
            "version": deepinfer_core.__version__,
            "max_batch_tokens": engine.intake.limits.max_batch_tokens,
            "max_running": engine.intake.limits.max_running,
            "points": len(profiler.kept),
            "points_left_out": len(profiler.points) - len(profiler.kept),
            **plan.facts,
        }
    finally:
        engine.close()
    return StepProfile(facts=facts, samples=samples)


class _Profiler:
    """Sends small loads through an engine and keeps the shape and time of every step.

    Each point runs once, so that whatever is lazy happens and prefixes are cached, and then ``rounds`` times, in turns
    with the others as long as the cache has room for the prefixes of all. Points that would take longer than is left
    of ``seconds``, by the steps measured before them, are left out.
    """

    def __init__(
        self,
        engine: Engine,
        rounds: int,
        seconds: float | None,
        progress: Callable[[str], None],
        share: Callable[[float], None],
    ) -> None:
        self.engine = engine
        self.core = engine.core
        self.rounds = rounds
        self.seconds = seconds
        self.progress = progress
        self.share = share
        self.points = grid(engine.intake.limits)
        self.kept: list[Point] = []
        self.random = np.random.default_rng(0)
        self.samples: list[StepSample] = []
        self._rows = engine.intake.limits.max_batch_tokens
        self._caches = engine.planned.config.kv_cache.prefix_cache
        self._shared: dict[Point, list[list[int]]] = {}
        self._took: dict[Point, float] = {}  # of those that later rounds measure again
        shared = sum(each.shared for point in self.points for each in point.requests)
        self._lasts = not self._caches or shared <= engine.intake.limits.capacity // 2
        self._steps: dict[int, float] = {}  # rows -> wall seconds of the last such step: what others will take
        self._shapes: dict[int, StepShape] = {}
        self._ended = 0.0  # the last step, by the wall
        self._done = 0
        self._measuring: Point | None = None
        self._spent = 0.0
        self._names = 0

    def run(self) -> Sequence[StepSample]:
        observer = self.core.observer
        observer.plan_watchers.append(self._planned)
        observer.watchers.append(self._committed)
        try:
            for number, point in enumerate(self.points, 1):
                if self._has_time(point):
                    self.progress(f"round 1 of {self.rounds}, point {number} of {len(self.points)}: {point.name}")
                    self._first(point)
                later = self.rounds - 1 if point in self._took else 0
                self._tell((1 + self.rounds - later) * point.size(self._rows))
            for round in range(1, self.rounds):
                for number, (point, took) in enumerate(self._took.items(), 1):
                    if self.seconds is None or self._spent + took <= self.seconds:
                        place = f"point {number} of {len(self._took)}"
                        self.progress(f"round {round + 1} of {self.rounds}, {place}: {point.name}")
                        self._spent += self._measure(point)
                    self._tell(point.size(self._rows))
        finally:
            observer.plan_watchers.remove(self._planned)
            observer.watchers.remove(self._committed)
        return self.samples

    def _tell(self, size: int) -> None:
        self._done += size
        all_points = (1 + self.rounds) * sum(point.size(self._rows) for point in self.points)
        of_the_time = self._spent / self.seconds if self.seconds else 0.0
        self.share(min(1.0, max(self._done / all_points, of_the_time)))

    def _has_time(self, point: Point) -> bool:
        """Whether what is left of the time does for this point, and the later rounds of those before it."""
        if self.seconds is None or len(self.kept) < LEAST_POINTS:
            return True
        later = (self.rounds - 1) * sum(self._took.values())
        own = self._expected(point, False) + self.rounds * self._expected(point, self._caches)
        return self._spent + later + own <= self.seconds

    def _expected(self, point: Point, cached: bool) -> float:
        """Seconds, by the steps measured so far: between two sizes, or in proportion beyond the largest."""
        rows = np.array(list(point.steps(self._rows, cached)), np.float64)
        known = np.array(sorted(self._steps.items()))
        largest = known[-1, 0]
        seconds = np.interp(rows, known[:, 0], known[:, 1]) * np.maximum(rows / largest, 1.0)
        return float(seconds.sum())

    def _first(self, point: Point) -> None:
        """Once for what is lazy, once measured. What compiles then takes nothing from the time."""
        self._shared[point] = [self._ids(each.shared) for each in point.requests]
        began = time.monotonic()
        self._send(point)
        first = time.monotonic() - began
        took = self._measure(point)
        self._spent += min(first, self._expected(point, False)) + took
        self.kept.append(point)
        if self._lasts or not any(each.shared for each in point.requests):
            self._took[point] = took
        else:
            self._spent += sum(self._measure(point) for _ in range(1, self.rounds))

    def _measure(self, point: Point) -> float:
        self._ended = began = time.monotonic()
        self._measuring = point
        self._send(point)
        self._measuring = None
        return time.monotonic() - began

    def _send(self, point: Point) -> None:
        requests = list(zip(self._shared[point], point.requests, strict=True))
        early = len(requests) - point.late
        self._add(requests[:early])
        for _ in range(LATE if point.late else 0):
            self.core.step()
        self._add(requests[early:])
        while self.core.has_unfinished:
            self.core.step()

    def _add(self, requests: Sequence[tuple[list[int], Asked]]) -> None:
        for shared, asked in requests:
            self._names += 1
            params = SamplingParams(temperature=0, max_tokens=asked.output, ignore_eos=True)
            ids, now = [*shared, *self._ids(asked.fresh)], self.core.clock()
            name = f"profile-{self._names}"
            self.core.add([self.engine.intake.request(name, ids, params, now=now, stream=False)])

    def _ids(self, count: int) -> list[int]:
        ids: list[int] = self.random.integers(0, self.engine.intake.limits.vocab_size, count).tolist()
        return ids

    def _planned(self, plan: StepPlan) -> None:
        if self._measuring is not None:
            self._shapes[plan.number] = step_shape(plan, self.core.planner.slots)

    def _committed(self, timing: StepTiming) -> None:
        shape = self._shapes.pop(timing.number, None)
        if shape is None or self._measuring is None:
            return
        now = time.monotonic()
        self._steps[shape.tokens], self._ended = now - self._ended, now
        # One step ahead, the host's work is hidden behind the device's; otherwise a step is all of it.
        seconds = timing.seconds if self.core.ahead else timing.commit_end - timing.plan_start
        if not self._measuring.decodes or shape.prefill == 0:
            self.samples.append(StepSample(shape=shape, seconds=seconds))
