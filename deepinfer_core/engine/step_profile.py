"""Measures what steps of a real engine cost, over a grid of prompt rows, decode rows and contexts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import deepinfer_core
from deepinfer_core.api.simulation import StepProfile, StepSample, StepShape
from deepinfer_core.config import load_config, override

from .assemble import Engine
from .open_engine import open_engine
from .sampling_params import SamplingParams
from .step_plan import StepPlan
from .step_shape import step_shape
from .step_timing import StepTiming

CONTEXTS = (8, 128, 512, 2048)
DECODED = 12
"""Tokens that each request of a decode point produces."""


def profile_steps(
    settings: Mapping[str, Any],
    *,
    rounds: int,
    progress: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> StepProfile:
    """See :func:`deepinfer_core.api.simulation.profile_steps`."""
    config = override(load_config(), {"logging.progress": False, **settings}, source="profile-steps")
    engine = open_engine(config, clock=clock)
    try:
        samples = _Profiler(engine).run(rounds, progress)
        plan = engine.planned.plan
        facts = {
            "model": engine.planned.spec.architecture,
            "accelerator": plan.accelerator,
            "dtype": engine.planned.spec.dtype,
            "version": deepinfer_core.__version__,
            "max_batch_tokens": engine.intake.limits.max_batch_tokens,
            "max_running": engine.intake.limits.max_running,
            **plan.facts,
        }
    finally:
        engine.close()
    return StepProfile(facts=facts, samples=samples)


class _Profiler:
    """Sends small loads through an engine and keeps the shape and time of every step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.core = engine.core
        self.random = np.random.default_rng(0)
        self.samples: list[StepSample] = []
        self._shapes: dict[int, StepShape] = {}
        self._names = 0
        limits = engine.intake.limits
        self.longest = min(limits.max_model_len, limits.capacity)
        self.capacity = limits.capacity
        self.rows = limits.max_batch_tokens
        self.running = limits.max_running

    def run(self, rounds: int, progress: Callable[[str], None]) -> Sequence[StepSample]:
        observer = self.core.observer
        points = list(self._points())
        for round in range(-1, rounds):  # the first one lets lazy initialisation happen
            for number, (name, load) in enumerate(points, 1):
                progress(f"round {round + 1} of {rounds}, point {number} of {len(points)}: {name}")
                if round == 0 and number == 1:
                    observer.plan_watchers.append(self._planned)
                    observer.watchers.append(self._committed)
                load()
        observer.plan_watchers.remove(self._planned)
        observer.watchers.remove(self._committed)
        return self.samples

    def _points(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Prompts alone, in one chunk or in several; decoding at several contexts; both together."""
        for prompt in sorted({*_powers(min(self.rows, self.longest - 1)), min(self.longest - 1, 4 * self.rows)}):
            yield f"a prompt of {prompt} tokens", lambda n=prompt: self._send([(n, 1)])  # type: ignore[misc]
        for running in _powers(self.running):
            for context in CONTEXTS:
                if context + DECODED < self.longest and running * (context + DECODED + 32) <= self.capacity:
                    load = [(context, DECODED)] * running
                    yield f"{running} requests decode at {context} tokens", lambda load=load: self._send(load)  # type: ignore[misc]
        for prompt in _powers(min(self.rows, self.longest - 1))[3::2]:
            load = [(8, 3 * DECODED)] * min(8, self.running - 1) + [(prompt, 1)]
            yield f"a prompt of {prompt} tokens beside decoding", lambda load=load: self._send(load, 1)  # type: ignore[misc]

    def _send(self, load: Sequence[tuple[int, int]], late: int = 0) -> None:
        """Run requests of these prompt and output lengths; the last ``late`` come once the others decode."""
        self._add(load[: len(load) - late])
        for _ in range(4 if late else 0):
            self.core.step()
        self._add(load[len(load) - late :])
        while self.core.has_unfinished:
            self.core.step()

    def _add(self, load: Sequence[tuple[int, int]]) -> None:
        limits = self.engine.intake.limits
        for prompt, output in load:
            self._names += 1
            ids = self.random.integers(0, limits.vocab_size, prompt).tolist()
            params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
            now = self.core.clock()
            name = f"profile-{self._names}"
            self.core.add([self.engine.intake.request(name, ids, params, now=now, stream=False)])

    def _planned(self, plan: StepPlan) -> None:
        self._shapes[plan.number] = step_shape(plan, self.core.planner.slots)

    def _committed(self, timing: StepTiming) -> None:
        shape = self._shapes.pop(timing.number, None)
        if shape is not None:
            # One step ahead, the host's work is hidden behind the device's; otherwise a step is all of it.
            seconds = timing.seconds if self.core.ahead else timing.commit_end - timing.plan_start
            self.samples.append(StepSample(shape=shape, seconds=seconds))


def _powers(limit: int) -> list[int]:
    """1, 2, 4, ... and the limit itself."""
    return sorted({*(1 << bit for bit in range(limit.bit_length())), limit} - {0})
