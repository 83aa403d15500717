"""Sequential temperature scaling: make what a drafter says of its drafts come true (arXiv:2607.05147, section 4).

A draft's survival is the product of the confidences up to it. Position by position, one temperature of the confidence's
logit is chosen so that the survival so far has the smallest expected calibration error, those before it fixed.

A temperature leaves a confidence of one half where it is. Where drafts of some position are all accepted less often
than they say, a bias beside it is what helps (Platt scaling; ours, not the paper's): ``sigmoid(logit / T + b)``. Both
are chosen so that the survival so far has the smallest log loss: a proper score, which unlike ten bins leaves no room
for chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

Array = np.ndarray[Any, Any]

BINS = 10
GRID = np.exp(np.linspace(np.log(0.2), np.log(5.0), 81))
"""Temperatures tried; 1 is among them."""

WIDTH = (float(np.log(5.0)), 3.0)
"""Logarithms of temperatures, and biases, are looked for as far from 0."""
ACROSS, NARROWER, ZOOMS = 9, 3, 6
"""Values of each tried at once; around the best of them again, so much narrower, so often."""

LARGEST_LOGIT = 60.0
FEWEST = 50
"""Drafts of a position below which its temperature stays that of the position before it."""


@attrs.frozen
class Scaling:
    """Temperatures and biases, by position; the last of each serves all further positions."""

    temperatures: tuple[float, ...] = (1.0,)
    biases: tuple[float, ...] = (0.0,)

    def at(self, position: int) -> tuple[float, float]:
        t, b = self.temperatures, self.biases
        return t[min(position, len(t) - 1)], b[min(position, len(b) - 1)]


PLAIN = Scaling()
"""Confidences as they are."""


def tempered(logits: Array, temperature: float, bias: float = 0.0) -> Array:
    """``sigmoid(logit / T + b)``, the argument kept within +-60."""
    result: Array = 1 / (1 + np.exp(-np.clip(logits / temperature + bias, -LARGEST_LOGIT, LARGEST_LOGIT)))
    return result


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
    """

    logits: Array
    accepted: Array
    prompts: Array

    @classmethod
    def of(
        cls, confidences: Sequence[Sequence[float]], accepted: Sequence[int], prompts: Sequence[str] | None = None
    ) -> Records:
        """``prompts``: a name each, None: each draft is another's."""
        width = max(map(len, confidences), default=0)
        logits = np.full((len(confidences), width), np.nan)
        for row, said in enumerate(confidences):
            logits[row, : len(said)] = logits_of(np.array(said, np.float64))
        numbers = np.arange(len(accepted))
        if prompts is not None:
            known = {name: i for i, name in enumerate(dict.fromkeys(prompts))}
            numbers = np.array([known[name] for name in prompts], np.int64)
        return cls(logits=logits, accepted=np.array(accepted, np.int64), prompts=numbers)

    def part(self, rows: Array) -> Records:
        return Records(logits=self.logits[rows], accepted=self.accepted[rows], prompts=self.prompts[rows])

    def survival(self, scaling: Scaling) -> Array:
        """``[N, n]``: chance said that draft j and all before it are accepted, NaN past the end of a draft."""
        said = [tempered(self.logits[:, k], *scaling.at(k)) for k in range(self.logits.shape[1])]
        return np.cumprod(np.stack(said, 1), axis=1) if said else np.ones_like(self.logits)

    def crossed(self, *, bias: bool) -> Array:
        """As :meth:`survival`, that of each half of the prompts scaled as fits the other half."""
        even = self.prompts % 2 == 0
        said = np.full_like(self.logits, np.nan)
        for half in (even, ~even):
            said[half] = self.part(half).survival(fit(self.part(~half), bias=bias))
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


def fit(records: Records, *, bias: bool = False) -> Scaling:
    """One temperature for each position, left to right; with ``bias`` also one bias."""
    temperatures: list[float] = []
    biases: list[float] = []
    product = np.ones(len(records.logits))
    for k in range(records.logits.shape[1]):
        there = ~np.isnan(records.logits[:, k])
        before, logits, came = product[there], records.logits[there, k], (records.accepted > k)[there]
        best = (temperatures[-1], biases[-1]) if temperatures else (1.0, 0.0)
        if int(there.sum()) >= FEWEST:
            best = _pair(before, logits, came) if bias else (_temperature(before, logits, came), 0.0)
        temperatures.append(best[0])
        biases.append(best[1])
        product = product * tempered(records.logits[:, k], *best)
    return Scaling(tuple(temperatures), tuple(biases))


def _temperature(before: Array, logits: Array, came: Array) -> float:
    """The one with the least calibration error; of equally good ones that which changes least."""
    errors = np.array([expected_calibration_error(before * tempered(logits, float(t)), came) for t in GRID])
    good = GRID[errors <= errors.min()]
    return float(good[np.abs(np.log(good)).argmin()])


def _pair(before: Array, logits: Array, came: Array) -> tuple[float, float]:
    """Temperature and bias with the least log loss."""

    def loss(log_temperature: float, bias: float) -> float:
        said = np.clip(before * tempered(logits, float(np.exp(log_temperature)), bias), 1e-9, 1 - 1e-9)
        return -float(np.log(np.where(came, said, 1 - said)).mean())

    best, wide = (0.0, 0.0), np.array(WIDTH)
    for _ in range(ZOOMS):
        steps = np.linspace(-1.0, 1.0, ACROSS)
        tried = [(best[0] + t * wide[0], best[1] + b * wide[1]) for t in steps for b in steps]
        best = min(tried, key=lambda each: loss(*each))
        wide = wide / NARROWER
    return float(np.exp(best[0])), float(best[1])
