"""What a step costs by its rows: measured when the engine starts, corrected while it runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from deepinfer_core.api import MeasureStep, VerifyCost

Array = np.ndarray[Any, Any]

TIMED = 5
"""Turns of each size at most, after one run that may compile and one that counts as well; these two may take this share
of the time:"""
WARM_SHARE = 2 / 3
QUICK = 1 / 200
"""Of the time allowed: steps no longer than this are timed as often as may be."""
LONGEST = 4
"""Times the time allowed, first runs included."""
FAR = 4
"""Times the rows of one of the first sizes to the next."""

KEPT = 256
"""Steps that a correction is fitted to, at most; first after so many, then once for so many new ones:"""
FIRST_FIT, FIT_EACH = 8, 32
FIT_ROUNDS = 8
LEAST_ERROR = 0.01
"""Relative errors below it count alike."""
LOADS = 0.1
"""Steps of one size differ from those of another by so much for other reasons, as other work on the machine: what a
slope is believed depends on how much more than that rows a second differ between the steps fitted to."""
ALIKE_IN_A_ROW = 8
"""Steps that other work slows alike: so many tell no more than one."""
LATELY = 8
FAR_OFF = 2
"""A step counts as off from what was expected by at most so many times the median of that many last ones, or
:data:`LOADS`. Other work that falls on the few steps of one size would else be all that is known of it. What all steps
take from now on is believed after half of them."""
FADING = 0.1
"""Of a slope that steps of one size neither confirm nor deny, at each fit."""
DRAFT_SAMPLES = 9
LEAST_SHARE = 0.25
"""Of the measured cost that a correction leaves."""
TOGETHER = 4
"""Rows of a request that are measured together: drafts are rows of a request that is there anyway."""
CHEAPER = 0.5
"""Drafts are taken to cost as much as rows of other requests unless they cost less than this share of it: on a busy
machine a measurement tells no more."""
BRIEF = 0.1
"""Seconds of a step that is repeated for that: about a second in all."""
TELLS = 1.25
"""Times what fewer rows cost: less than that says nothing of a row."""


def measure_table(
    measure: MeasureStep,
    rows: Sequence[int],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[int, float]]:
    """``(rows, seconds of a step)``, ascending.

    Two runs come first. Then the sizes take turns, so that a while of other work on the machine slows all of them and
    not one; of each the fastest counts. Where the time allowed is too short for all sizes, those measured lie all over
    the range, or as far up as it goes, since nothing can be said of what lies beyond them: first some far apart,
    upwards, then always one in the widest gap. Two sizes and one turn are measured at least; sizes so quick that it
    hardly costs time have all their turns, since most steps are of these. What does not fit the memory is left out.
    The first run of a size, which may compile kernels for seconds, does not count among the time, as long as all of it
    takes no more than four times as long.
    """
    started, spent, warm = clock(), 0.0, dict[int, float]()
    left = sorted(rows)
    while left:
        count = _next_size(left, sorted(warm))
        late = clock() - started > LONGEST * seconds
        if len(warm) >= 2 and (late or spent + 2 * _expected(count, warm) > WARM_SHARE * seconds):
            if count < max(warm):
                break
            left = [size for size in left if size < count]
            continue
        try:
            measure(count)
            began = clock()
            warm[count] = measure(count)
            spent += 2 * (clock() - began)
            left.remove(count)
        except MemoryError:
            left = [size for size in left if size < count]
    sizes = sorted(warm)
    turns: list[list[float]] = []
    while len(turns) < TIMED:
        began = clock()
        turns.append([measure(count) for count in sizes])
        turn = clock() - began
        spent += turn
        if spent + turn > seconds:
            break
    best = {count: min(warm[count], *times) for count, times in zip(sizes, zip(*turns, strict=True), strict=True)}
    largest = max((count for count in sizes if best[count] <= QUICK * seconds), default=0)
    quick = [count for count in sizes if count <= largest]
    for _ in range(TIMED - len(turns)):
        best |= {count: min(best[count], measure(count)) for count in quick}
    return sorted(best.items())


def measure_draft_share(measure: MeasureStep, table: Sequence[tuple[int, float]]) -> float:
    """What a draft costs, over what a row of one more request does: 1, or less where that is plain.

    Rows of one request share what is read of its context, and are one call where operators run request by request.
    At the largest of the sizes that take no more than :data:`BRIEF` seconds and at the middle one the same rows take
    turns, apart and :data:`TOGETHER` of each request, and the requests of these alone; of each the fastest counts, and
    of the two sizes the larger share.
    """
    enough = [(rows, cost) for rows, cost in table if rows >= 2 * TOGETHER]
    if not enough:
        return 1.0
    sizes = [rows for rows, cost in enough if cost <= BRIEF] or [enough[0][0]]
    found = []
    for rows in sorted({sizes[-1], sizes[len(sizes) // 2]}):
        ways = ((-(-rows // TOGETHER), 1), (rows, TOGETHER), (rows, 1))
        try:
            fewer, together, apart = (min(times) for times in zip(*_turns(measure, ways), strict=True))
        except MemoryError:
            return 1.0
        if apart < TELLS * fewer:
            return 1.0
        found.append(max(0.0, together - fewer) / (apart - fewer))
    share = max(found)
    return share if share < CHEAPER else 1.0


def _turns(measure: MeasureStep, ways: Sequence[tuple[int, int]]) -> list[list[float]]:
    """Seconds of each way, rows and those of a request, in each of :data:`TIMED` turns."""
    return [[measure(rows, each) for rows, each in ways] for _ in range(TIMED)]


def _next_size(left: Sequence[int], measured: Sequence[int]) -> int:
    """The smallest size; upwards, sizes about four times the one before; then the middle of the widest gap.

    Both ascending; ``left`` is not empty.
    """
    if not measured:
        return left[0]
    above = [size for size in left if size > measured[-1]]
    if above:
        return max((size for size in above if size <= FAR * measured[-1]), default=above[0])
    gaps = [[size for size in left if low < size < high] for low, high in pairwise(measured)]
    widest = max(gaps, key=len)
    return widest[len(widest) // 2]


def _expected(count: int, known: Mapping[int, float]) -> float:
    """Seconds of a step of so many rows: between two that are known, or as from the last two on."""
    rows = sorted(known)
    if count < rows[-1]:
        return float(np.interp(count, rows, [known[size] for size in rows]))
    low, high = rows[-2:]
    slope = max(0.0, (known[high] - known[low]) / (high - low))
    return known[high] + slope * (count - high)


class StepCosts:
    """Seconds of a step as a function of its rows, and of drafting as a function of the requests drafted for.

    Between measured sizes the cost is interpolated, beyond them it goes on as between the last two. It never falls
    with more rows: a size that took longer than a larger one was disturbed, and costs at most what that one does.
    What steps really take corrects it: a factor where all are slower, as beside other work, and seconds for each row,
    since contexts are longer than those of the measurement. Steps of one size, or nearly, cannot tell them apart: then
    it is the factor, which leaves the table its shape. ``fits`` counts corrections.

    The table holds steps of one row a request. ``draft_share`` is what a draft adds to a step, over what a row of one
    more request does (:func:`measure_draft_share`).
    """

    def __init__(self, table: Sequence[tuple[int, float]], draft_share: float = 1.0) -> None:
        if not table:
            raise ValueError("a cost table needs at least one measurement")
        self.draft_share = draft_share
        self.rows = np.array([row for row, _ in table], np.float64)
        seconds = np.array([cost for _, cost in table], np.float64)
        self.seconds = np.minimum.accumulate(seconds[::-1])[::-1]
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=KEPT)
        self._off: deque[float] = deque([0.0] * (LATELY // 2), maxlen=LATELY)
        self._since_fit = 0
        self._drafts: dict[int, deque[float]] = {}
        self._known: dict[int, float] = {}
        self._built: set[tuple[str, int]] = set()
        self._drafted_before = False
        self._depth = 1
        self._factor, self._slope = 1.0, 0.0
        self.fits = 0

    def __call__(self, rows: Array) -> Array:
        """``[m]`` rows -> ``[m]`` seconds, corrected."""
        plain = self.measured(rows)
        corrected: Array = np.maximum(self._factor * plain + self._slope * rows, LEAST_SHARE * plain)
        return corrected

    def verifying(self, requests: int, rows: Array) -> Array:
        """``[m]`` rows of so many requests, the rest of them drafts -> ``[m]`` seconds, corrected."""
        cost = self(rows)
        if self.draft_share == 1.0:
            return cost
        alone = self(np.minimum(rows, requests))
        shared: Array = self._with_drafts(alone, cost)
        return shared

    def _with_drafts(self, alone: Any, apart: Any) -> Any:
        """Between what requests cost without drafts and what they would if each draft were another request's row."""
        return alone + self.draft_share * (apart - alone)

    def _as_measured(self, requests: int, rows: int) -> tuple[float, float]:
        """Rows apart that would cost as much for each row more, and seconds by the table."""
        alone = min(requests, rows)
        fewer, cost = self.measured(np.array([alone, rows]))
        return self._with_drafts(alone, rows), float(self._with_drafts(fewer, cost))

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

        Where there are none for just so many, those of the nearest number, scaled as a target's step of as many rows
        as are drafted.
        """
        known = self._known
        if not known:
            return 0.0
        if requests in known:
            return known[requests] * self._factor
        nearest = min(known, key=lambda count: max(count / requests, requests / count))
        before, wanted = self.measured(self._depth * np.array([nearest, requests]))
        return float(known[nearest] * wanted / before) * self._factor

    @property
    def slope(self) -> float:
        """Seconds a row costs more than measured: contexts are longer than those of the measurement."""
        return self._slope

    def observe(self, cost: VerifyCost) -> None:
        """Learn from a step. Steps with prompt rows tell nothing about rows that decode; the first one of so many rows
        also builds what later ones find built."""
        self._learn_drafting(cost)
        if not cost.decode or cost.rows == 0:
            return
        if self._builds("rows", cost.rows):
            return
        rows, plain = self._as_measured(cost.requests, cost.rows)
        self._steps.append((rows, plain, self._believed(cost)))
        self._since_fit += cost.steps
        if self._since_fit >= (FIT_EACH if self.fits else FIRST_FIT):
            self._fit()

    def _believed(self, cost: VerifyCost) -> float:
        """What a step took, or as much of it as one step is taken at its word for."""
        expected = float(self.verifying(cost.requests, np.array([cost.rows]))[0])
        off = cost.target_seconds / expected - 1
        self._off.append(abs(off))
        most = FAR_OFF * max(median(self._off), LOADS)
        return expected * (1 + min(max(off, -most), most))

    def _builds(self, kind: str, count: int) -> bool:
        """Whether this is the first step of its kind and size, whose time is no measure of the next one's."""
        first = (kind, count) not in self._built
        self._built.add((kind, count))
        return first

    def _learn_drafting(self, cost: VerifyCost) -> None:
        """What drafting cost, as it would where the table was measured.

        The step it was part of tells how busy the machine is just then: what the target takes is the median of many
        steps, and must not be compared with drafting at another time. The first drafting for so many requests also
        builds what later ones find built. One after a pause also catches up, one beside prompts absorbs these: without
        that they are rough times, for as long as there are no others.
        """
        count, paused = cost.drafted, not self._drafted_before or cost.steps > 1
        self._drafted_before = bool(count)
        if not count:
            return
        if self._builds("drafting", count):
            return
        if cost.chances is not None:
            self._depth = cost.chances.shape[1]
        load = self._factor
        if cost.decode and cost.rows and self.fits:
            load *= cost.target_seconds / float(self.verifying(cost.requests, np.array([cost.rows]))[0])
        if paused or not cost.decode:
            if count not in self._drafts:
                self._known[count] = (cost.draft_seconds - cost.absorb_seconds) / load
        else:
            times = self._drafts.setdefault(count, deque(maxlen=DRAFT_SAMPLES))
            times.append(cost.draft_seconds / load)
            self._known[count] = median(times)

    def _fit(self) -> None:
        """Factor and slope with the least absolute error, relative to the measured costs, so that some disturbed steps
        do no harm. As far as the sizes are too much alike to tell a slope, it is that of before, which fades."""
        self._since_fit = 0
        rows, plain, found = np.array(self._steps, np.float64).T
        share, ratio = rows / plain, found / plain
        spread, found_slope = float(share.std() / share.mean()), _slope(share, ratio)
        apart = ratio - found_slope * share
        noise = float(np.median(np.abs(apart / max(float(np.median(apart)), LEAST_SHARE) - 1)))
        doubt = LOADS**2 + noise**2 * ALIKE_IN_A_ROW / len(ratio)
        trust = spread**2 / (spread**2 + doubt)
        slope = (1 - trust) * (1 - FADING) * self._slope + trust * found_slope
        factor = float(np.median(ratio - slope * share))
        if factor < LEAST_SHARE:  # what these steps took stands, whatever their shape
            factor = LEAST_SHARE
            slope = max(0.0, float(np.median((ratio - factor) / share)))
        self._factor, self._slope = factor, slope
        self.fits += 1


def _slope(share: Array, ratio: Array) -> float:
    """Of ``ratio`` over ``share``: least absolute error by reweighted least squares. Not below 0, nor so much that less
    than :data:`LEAST_SHARE` would be left for the factor."""
    factor, slope = float(np.median(ratio)), 0.0
    for _ in range(FIT_ROUNDS):
        weight = 1 / np.maximum(np.abs(ratio - factor - slope * share), LEAST_ERROR)
        weight /= weight.sum()
        away = share - (weight * share).sum()
        spread = float((weight * away**2).sum())
        slope = max(float((weight * away * ratio).sum()) / spread, 0.0) if spread else 0.0
        factor = float((weight * (ratio - slope * share)).sum())
    return min(slope, max(0.0, float(np.median(ratio) - LEAST_SHARE) / float(np.median(share))))
