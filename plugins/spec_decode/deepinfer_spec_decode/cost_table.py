"""What a step costs by its rows: measured when the engine starts, corrected while it runs."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import Any

import numpy as np

from deepinfer_core.api import VerifyCost

Array = np.ndarray[Any, Any]

TIMED = 5
"""Runs of each size after one to warm up; the fastest and the slowest are left out."""

MIN_SAMPLES = 10
KEPT = 200
"""Steps of one size that a correction is the median of, at most."""
DRAFT_SAMPLES = 9
LEAST_SHARE = 0.25
"""Of the measured cost that a correction leaves."""


def measure_table(
    measure: Callable[[int], float],
    rows: Sequence[int],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[int, float]]:
    """``(rows, seconds of a step)``, ascending. Stops before a size that would pass the time allowed, after two sizes
    at least, and at one that does not fit the memory."""
    table: list[tuple[int, float]] = []
    started = clock()
    for count in rows:
        spent = clock() - started
        if len(table) >= 2 and spent + (TIMED + 1) * table[-1][1] * count / table[-1][0] > seconds:
            break
        try:
            measure(count)
            timed = sorted(measure(count) for _ in range(TIMED))
        except MemoryError:
            break
        table.append((count, mean(timed[1:-1])))
    return table


class StepCosts:
    """Seconds of a step as a function of its rows, and of drafting as a function of the requests drafted for.

    Between measured sizes the cost is interpolated, beyond them it goes on as between the last two. It never falls
    with more rows: a size that took longer than a larger one was disturbed, and costs at most what that one does.
    What steps really take corrects it: a factor where all are slower, as beside other work, and seconds for each row,
    since contexts are longer than those of the measurement. Steps of one size alone cannot tell them apart: then it is
    the factor, which leaves open what more rows cost over fewer. ``version`` counts what was learned.
    """

    def __init__(self, table: Sequence[tuple[int, float]]) -> None:
        if not table:
            raise ValueError("a cost table needs at least one measurement")
        self.rows = np.array([row for row, _ in table], np.float64)
        seconds = np.array([cost for _, cost in table], np.float64)
        self.seconds = np.minimum.accumulate(seconds[::-1])[::-1]
        self._residuals: dict[int, deque[float]] = {}
        self._counts: dict[int, int] = {}
        self._medians: dict[int, float] = {}
        self._drafts: dict[int, deque[float]] = {}
        self._drafted = False
        self._factor, self._slope = 1.0, 0.0
        self.version = 0

    def __call__(self, rows: Array) -> Array:
        """``[m]`` rows -> ``[m]`` seconds, corrected."""
        plain = self.measured(rows)
        corrected: Array = np.maximum(self._factor * plain + self._slope * rows, LEAST_SHARE * plain)
        return corrected

    def measured(self, rows: Array) -> Array:
        """As the table says."""
        rows = np.asarray(rows, np.float64)
        cost: Array = np.interp(rows, self.rows, self.seconds)
        if len(self.rows) > 1:
            step = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
            cost = cost + np.maximum(rows - self.rows[-1], 0.0) * step
        return cost

    def drafting(self, requests: int) -> float:
        """Seconds of drafting for so many requests: the median of the last times, 0 before the second.

        Where there are none for just so many, those of the nearest number, scaled as the target's own steps scale.
        """
        if requests in self._drafts:
            return median(self._drafts[requests])
        if not self._drafts:
            return 0.0
        nearest = min(self._drafts, key=lambda known: abs(math.log(known / requests)))
        known, wanted = self(np.array([nearest, requests]))
        return float(median(self._drafts[nearest]) * wanted / known)

    @property
    def slope(self) -> float:
        """Seconds a row costs more than measured: contexts are longer than those of the measurement."""
        return self._slope

    def observe(self, cost: VerifyCost) -> None:
        """Learn from a step. Steps with prompt rows tell nothing about rows that decode."""
        if cost.drafted and not self._drafted:
            self._drafted = True  # the first time also builds what later ones find built
        elif cost.drafted:
            self._drafts.setdefault(cost.drafted, deque(maxlen=DRAFT_SAMPLES)).append(cost.draft_seconds)
            self.version += 1
        if not cost.decode or cost.rows == 0:
            return
        kept = self._residuals.setdefault(cost.rows, deque(maxlen=KEPT))
        kept.append(cost.target_seconds)
        count = self._counts[cost.rows] = self._counts.get(cost.rows, 0) + 1
        if count % MIN_SAMPLES == 0:
            self._medians[cost.rows] = median(kept)
            self._factor, self._slope = self._fitted()
            self.version += 1

    def _fitted(self) -> tuple[float, float]:
        """Factor and slope with the least squared error relative to the measured costs, neither below its least."""
        rows = np.array(sorted(self._medians), np.float64)
        plain = self.measured(rows)
        found = np.array([self._medians[int(r)] for r in rows])
        if len(rows) == 1:
            return max(float(found[0] / plain[0]), LEAST_SHARE), 0.0
        share, ratio = rows / plain, found / plain
        spread = float(((share - share.mean()) ** 2).sum())
        slope = float(((share - share.mean()) * (ratio - ratio.mean())).sum()) / spread if spread else 0.0
        slope = max(slope, 0.0)
        factor = float((ratio - slope * share).mean())
        if factor < LEAST_SHARE:
            return LEAST_SHARE, max(0.0, float((share * (ratio - LEAST_SHARE)).sum() / (share**2).sum()))
        return factor, slope
