"""Confidence-scheduled verification: verify what pays, stop drafting while nothing does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from deepinfer_core.api import VerifyCost

from .budget import allocate, early_stop_budget, global_budget, throughput
from .cost_cache import cache_directory, file_name, load, save
from .cost_table import StepCosts, measure_table
from .settings import Settings

Array = np.ndarray[Any, Any]

SECONDS_TO_MEASURE = 4.0
PATIENCE = 4
"""Decisions in a row against drafting before it stops, and decisions a probe is given."""

FEWER = 0.75
"""Drafting is tried again at once when so small a share of the requests is left."""


class ConfidenceSchedule:
    """The :class:`DraftSchedule` of every drafter here."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.costs = StepCosts([(1, 1.0)])
        self._misses = 0
        self._off = 0
        self._stopped_at = 0

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
        self.costs = StepCosts(table)
        return source

    def budget(self, survival: Array, caps: Array, rows: int, *, delayed: bool) -> int:
        drafting = self.costs.drafting(rows)
        rates = throughput(survival, caps, rows, lambda count: self.costs(count) + drafting)
        without = rows / float(self.costs(np.array([rows]))[0])
        if float(rates.max()) > without:
            self._misses = 0
        else:
            self._misses += 1
            if self._misses >= PATIENCE:
                self._off, self._stopped_at = self._settings.probe_steps, rows
        # What the drafts cost is spent; they are verified if that alone pays.
        search = global_budget if delayed else early_stop_budget
        return search(survival, caps, rows, self.costs)

    def drafts(self, requests: int) -> bool:
        if self._off and requests < FEWER * self._stopped_at:
            self._off = self._misses = 0
        if self._off:
            self._off -= 1
            if self._off == 0:
                self._misses = 0  # a probe: so many more decisions
            return False
        return True

    def allocate(self, survival: Array, caps: Array, total: int) -> Array:
        return allocate(survival, caps, total)

    def observe(self, cost: VerifyCost) -> None:
        self.costs.observe(cost)
