"""Sequential temperature scaling: make what a drafter says of its drafts come true (arXiv:2607.05147, section 4).

A draft's survival is the product of the confidences up to it. Position by position, one temperature of the confidence's
logit is chosen so that the survival so far has the smallest expected calibration error, those before it fixed.

A temperature leaves a confidence of one half where it is. Where drafts of some position are all accepted less often
than they say, a bias beside it is what helps (Platt scaling; ours, not the paper's): ``sigmoid(logit / T + b)``. Both
are chosen so that the survival so far has the smallest log loss: a proper score, which unlike ten bins leaves no room
for chance. Beside them counts how clearly the draft won (:mod:`.margins`; ours): ``+ s m + r sqrt(m)`` of the margin m,
two numbers as the odds of the best token grow fast close to a tie and slowly far from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from .log_loss import least_log_loss, sigmoid

Array = np.ndarray[Any, Any]

BINS = 10
GRID = np.exp(np.linspace(np.log(0.2), np.log(5.0), 81))
"""Temperatures tried; 1 is among them."""

STEEPEST = 5.0
"""Temperatures are looked for between one over this and this."""
FEWEST = 50
"""Drafts of a position below which its temperature stays that of the position before it."""


@attrs.frozen
class Scaling:
    """Temperatures, biases and weights of the margin and its root, by position; the last of each serves all further
    positions. ``margins`` is empty where these do not count.
    """

    temperatures: tuple[float, ...] = (1.0,)
    biases: tuple[float, ...] = (0.0,)
    margins: tuple[tuple[float, float], ...] = ()

    def at(self, position: int) -> tuple[float, float]:
        t, b = self.temperatures, self.biases
        return t[min(position, len(t) - 1)], b[min(position, len(b) - 1)]

    def margin_at(self, position: int) -> tuple[float, float]:
        return self.margins[min(position, len(self.margins) - 1)] if self.margins else (0.0, 0.0)


PLAIN = Scaling()
"""Confidences as they are."""


def tempered(logits: Array, temperature: float, bias: float | Array = 0.0) -> Array:
    """``sigmoid(logit / T + b)``, the argument kept within +-60."""
    return sigmoid(logits / temperature + bias)


def logits_of(confidence: Array) -> Array:
    """Of probabilities that were made at temperature 1."""
    clipped = np.clip(confidence, 1e-9, 1 - 1e-9)
    result: Array = np.log(clipped) - np.log1p(-clipped)
    return result


def expected_calibration_error(said: Array, came: Array) -> float:
    """Mean distance between what was said and how often it came true, over ten bins of equal width, by their counts."""
    if len(said) == 0:
        return 0.0
    bins = np.minimum((said * BINS).astype(int), BINS - 1)
    # A bin's means differ by the difference of its sums over its count, which is what it weighs.
    apart = np.bincount(bins, said, BINS) - np.bincount(bins, came, BINS)
    return float(np.abs(apart).sum()) / len(said)


@attrs.frozen(kw_only=True)
class Records:
    """Drafts and what became of them.

    Attributes:
        logits: ``[N, n]`` float64 of the confidences, NaN past the end of a draft. accepted: ``[N]`` drafts accepted.
        prompts: ``[N]`` int64, equal for drafts after the same prompt: these are alike, and are drawn, or left out,
            together.
        margins: ``[N, n]`` float64, how clearly each draft won (:mod:`.margins`); None of drafters that do not say.
    """

    logits: Array
    accepted: Array
    prompts: Array
    margins: Array | None = None

    @classmethod
    def of(
        cls,
        confidences: Sequence[Sequence[float]],
        accepted: Sequence[int],
        prompts: Sequence[str] | None = None,
        margins: Sequence[Sequence[float]] | None = None,
    ) -> Records:
        """``prompts``: a name each, None: each draft is another's."""
        width = max(map(len, confidences), default=0)
        numbers = np.arange(len(accepted))
        if prompts is not None:
            known = {name: i for i, name in enumerate(dict.fromkeys(prompts))}
            numbers = np.array([known[name] for name in prompts], np.int64)
        return cls(
            logits=logits_of(_padded(confidences, width)),
            accepted=np.array(accepted, np.int64),
            prompts=numbers,
            margins=None if margins is None else _padded(margins, width),
        )

    def part(self, rows: Array) -> Records:
        """Some of the drafts."""
        margins = None if self.margins is None else self.margins[rows]
        return Records(
            logits=self.logits[rows], accepted=self.accepted[rows], prompts=self.prompts[rows], margins=margins
        )

    def chances(self, scaling: Scaling, position: int) -> Array:
        """``[N]``: chance said that the draft there is accepted if all before it are, NaN past the end of a draft."""
        temperature, bias = scaling.at(position)
        moved: float | Array = bias
        if self.margins is not None and scaling.margins:
            slope, root = scaling.margin_at(position)
            moved = bias + slope * self.margins[:, position] + root * np.sqrt(self.margins[:, position])
        return tempered(self.logits[:, position], temperature, moved)

    def survival(self, scaling: Scaling) -> Array:
        """``[N, n]``: chance said that draft j and all before it are accepted, NaN past the end of a draft."""
        said = [self.chances(scaling, k) for k in range(self.logits.shape[1])]
        return np.cumprod(np.stack(said, 1), axis=1) if said else np.ones_like(self.logits)

    def crossed(self, *, bias: bool, margin: bool = False) -> Array:
        """As :meth:`survival`, that of each half of the prompts scaled as fits the other half."""
        even = self.prompts % 2 == 0
        said = np.full_like(self.logits, np.nan)
        for half in (even, ~even):
            said[half] = self.part(half).survival(fit(self.part(~half), bias=bias, margin=margin))
        return said

    def pairs(self, survival: Array) -> tuple[Array, Array]:
        """What was said and whether it came true, of all drafts at all positions, flat."""
        there = ~np.isnan(survival)
        return survival[there], (self.accepted[:, None] > np.arange(survival.shape[1]))[there]

    def error(self, survival: Array) -> float:
        """Expected calibration error over all positions together."""
        return expected_calibration_error(*self.pairs(survival))

    def standard_error(self, survival: Array, draws: int = 100) -> float:
        """Of :meth:`error`, by bootstrap over the prompts."""
        rng, found = np.random.default_rng(0), []
        order = np.argsort(self.prompts, kind="stable")
        groups = np.split(order, np.nonzero(np.diff(self.prompts[order]))[0] + 1)
        for _ in range(draws):
            rows = np.concatenate([groups[i] for i in rng.integers(0, len(groups), len(groups))])
            found.append(self.part(rows).error(survival[rows]))
        return float(np.std(found))

    def least_error(self, survival: Array, draws: int = 20) -> float:
        """What :meth:`error` would be if all that is said were true: so few drafts never come out even."""
        rng, found = np.random.default_rng(0), []
        before = np.concatenate((np.ones_like(survival[:, :1]), survival[:, :-1]), axis=1)
        chances = np.nan_to_num(survival / np.maximum(before, 1e-300))
        for _ in range(draws):
            accepted = np.cumprod(rng.random(chances.shape) < chances, axis=1).sum(1)
            found.append(attrs.evolve(self, accepted=accepted).error(survival))
        return float(np.mean(found))


def fit(records: Records, *, bias: bool = False, margin: bool = False) -> Scaling:
    """One temperature for each position, left to right; with ``bias`` also one bias, with ``margin`` also the weights
    of the margin, where the records have it."""
    margins = records.margins if margin else None
    temperatures, biases, weights = list[float](), list[float](), list[tuple[float, float]]()
    product = np.ones(len(records.logits))
    for k in range(records.logits.shape[1]):
        there = ~np.isnan(records.logits[:, k])
        before, logits, came = product[there], records.logits[there, k], (records.accepted > k)[there]
        found = (temperatures[-1], biases[-1], weights[-1]) if temperatures else (1.0, 0.0, (0.0, 0.0))
        if int(there.sum()) >= FEWEST:
            if bias or margins is not None:
                found = _weights(before, logits, None if margins is None else margins[there, k], came)
            else:
                found = _temperature(before, logits, came), 0.0, (0.0, 0.0)
        temperatures.append(found[0])
        biases.append(found[1])
        weights.append(found[2])
        so_far = Scaling(tuple(temperatures), tuple(biases), () if margins is None else tuple(weights))
        product = product * records.chances(so_far, k)
    return Scaling(tuple(temperatures), tuple(biases), () if margins is None else tuple(weights))


def _temperature(before: Array, logits: Array, came: Array) -> float:
    """The one with the least calibration error; of equally good ones that which changes least."""
    errors = np.array([expected_calibration_error(before * tempered(logits, float(t)), came) for t in GRID])
    good = GRID[errors <= errors.min()]
    return float(good[np.abs(np.log(good)).argmin()])


def _weights(
    before: Array, logits: Array, margins: Array | None, came: Array
) -> tuple[float, float, tuple[float, float]]:
    """Temperature, bias, and weights of the margin and its root, with the least log loss."""
    columns = [logits, np.ones_like(logits)]
    if margins is not None:
        columns += [margins, np.sqrt(margins)]
    start = np.array([1.0] + [0.0] * (len(columns) - 1))
    w = least_log_loss(before, np.stack(columns, 1), came, start, (1 / STEEPEST, STEEPEST))
    return 1 / float(w[0]), float(w[1]), (float(w[2]), float(w[3])) if margins is not None else (0.0, 0.0)


def _padded(rows: Sequence[Sequence[float]], width: int) -> Array:
    """``[N, width]`` float64, NaN past the end of a row."""
    result = np.full((len(rows), width), np.nan)
    for i, row in enumerate(rows):
        result[i, : len(row)] = row
    return result
