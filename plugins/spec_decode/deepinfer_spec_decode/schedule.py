"""Confidence-scheduled verification: verify what pays, draft only while that can be expected to."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from deepinfer_core.api import VerifyCost

from .budget import allocate, early_stop_budget, gain, global_budget, usable
from .cost_cache import cache_directory, file_name, load, save
from .cost_table import StepCosts, measure_table
from .settings import Settings

Array = np.ndarray[Any, Any]

SECONDS_TO_MEASURE = 4.0

REMEMBERED = 8
"""Drafts that are remembered at least: what is expected of the next ones."""

PROBE_SHARE = 0.01
"""Of the time, at most, is spent on probes."""


class ConfidenceSchedule:
    """The :class:`DraftSchedule` of every drafter here.

    Whether to draft at all is asked of what was drafted lately: the survival of those drafts, for as many requests as
    there are now, against the cost of verifying and of drafting. While that does not pay, a probe now and then finds
    out whether the text has become easier: what was remembered is forgotten, so that the probe's drafts decide.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._idle = 0
        self._learned = 0
        self._seen: deque[Array] = deque()
        self._costs_began(StepCosts([(1, 1.0)]))

    def _costs_began(self, costs: StepCosts) -> None:
        self.costs = costs
        self._asked: tuple[int, int, int] | None = None
        self._answer = True
        self._pause = 0  # steps before a probe

    def start(self, measure: Callable[[int], float], rows: Sequence[int], key: Mapping[str, str]) -> str:
        directory = cache_directory(self._settings.cost_cache)
        path = None if directory is None else directory / file_name(key, rows)
        table = None if path is None else load(path, self._settings.cost_cache_hours * 3600)
        source = f"cached in {path}"
        if table is None:
            table = measure_table(measure, rows, SECONDS_TO_MEASURE)
            source = f"measured now, {len(table)} step sizes up to {table[-1][0]} rows"
            if path is not None:
                save(path, key, table)
        self._costs_began(StepCosts(table))
        return source

    def budget(self, survival: Array, caps: Array, rows: int, *, delayed: bool) -> int:
        self._learn(survival, caps)
        # What the drafts cost is spent; they are verified if that alone pays.
        search = global_budget if delayed else early_stop_budget
        return search(survival, caps, rows, self.costs)

    def drafts(self, requests: int) -> bool:
        if self._pays(requests):
            self._idle = 0
            return True
        self._idle += 1
        if self._idle < self._pause:
            return False
        self._idle = 0
        self._seen.clear()
        return True

    def allocate(self, survival: Array, caps: Array, total: int) -> Array:
        return allocate(survival, caps, total)

    def observe(self, cost: VerifyCost) -> None:
        self.costs.observe(cost)

    def _learn(self, survival: Array, caps: Array) -> None:
        """Remember drafts of full length; those that count as certain are not known yet."""
        whole = (np.asarray(caps) == survival.shape[1]) & ~(survival == 1.0).all(1)
        if not whole.any():
            return
        self._seen.append(usable(survival[whole], np.asarray(caps)[whole]))
        while sum(map(len, self._seen)) - len(self._seen[0]) >= REMEMBERED:
            self._seen.popleft()
        self._learned += 1

    def _pays(self, requests: int) -> bool:
        """Whether drafting is expected to; it is before anything is known."""
        if not self._seen:
            return True
        asked = (requests, self._learned, self.costs.version)
        if self._asked != asked:
            drafting = self.costs.drafting(requests)
            self._asked = asked
            self._answer = gain(np.concatenate(self._seen), requests, self.costs, drafting) > 1.0
            step = float(self.costs(np.array([requests]))[0])
            self._pause = max(self._settings.probe_steps, math.ceil(drafting / (PROBE_SHARE * max(step, 1e-9))))
        return self._answer
