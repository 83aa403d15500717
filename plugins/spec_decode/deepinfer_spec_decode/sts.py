"""Sequential temperature scaling: make what a drafter says of its drafts come true (arXiv:2607.05147, section 4).

A draft's survival is the product of the confidences up to it. Position by position, one temperature of the confidence's
logit is chosen so that the survival so far has the smallest expected calibration error, those before it fixed.

A temperature leaves a confidence of one half where it is. Where drafts of some position are all accepted less often
than they say, a bias beside it is what helps (Platt scaling; ours, not the paper's): ``sigmoid(logit / T + b)``.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

Array = np.ndarray[Any, Any]

BINS = 10
GRID = np.exp(np.linspace(np.log(0.2), np.log(5.0), 81))
"""Temperatures tried; 1 is among them."""

BIASES = np.linspace(-3.0, 3.0, 61)
"""Biases tried, with every second temperature; 0 is among them."""
BRIER_SHARE = 0.3
"""Of the squared error, beside the calibration error, when two numbers are fitted: ten bins leave room for much."""

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
    """

    logits: Array
    accepted: Array

    @classmethod
    def of(cls, confidences: list[list[float]], accepted: list[int]) -> Records:
        width = max(map(len, confidences), default=0)
        logits = np.full((len(confidences), width), np.nan)
        for row, said in enumerate(confidences):
            logits[row, : len(said)] = logits_of(np.array(said, np.float64))
        return cls(logits=logits, accepted=np.array(accepted, np.int64))

    def part(self, rows: Array) -> Records:
        return Records(logits=self.logits[rows], accepted=self.accepted[rows])

    def outcomes(self, scaling: Scaling) -> list[tuple[Array, Array]]:
        """By position: the survival said, and whether the draft was accepted, over the drafts that reached so far."""
        found = []
        product = np.ones(len(self.logits))
        for k in range(self.logits.shape[1]):
            product = product * tempered(self.logits[:, k], *scaling.at(k))
            there = ~np.isnan(self.logits[:, k])
            found.append((product[there], (self.accepted > k)[there]))
        return found

    def error(self, scaling: Scaling) -> float:
        """Expected calibration error over all positions together."""
        pairs = self.outcomes(scaling)
        if not pairs:
            return 0.0
        return expected_calibration_error(np.concatenate([s for s, _ in pairs]), np.concatenate([c for _, c in pairs]))

    def standard_error(self, scaling: Scaling, draws: int = 100) -> float:
        """Of :meth:`error`, by bootstrap over the drafts."""
        rng, count = np.random.default_rng(0), len(self.accepted)
        drawn = [self.part(rng.integers(0, count, count)).error(scaling) for _ in range(draws)]
        return float(np.std(drawn))


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
            best = _best(before, logits, came, bias)
        temperatures.append(best[0])
        biases.append(best[1])
        product = product * tempered(records.logits[:, k], *best)
    return Scaling(tuple(temperatures), tuple(biases))


def _best(before: Array, logits: Array, came: Array, bias: bool) -> tuple[float, float]:
    """Temperature and bias with the least error; of equally good ones those that change least."""

    def error(temperature: float, shift: float) -> float:
        said = before * tempered(logits, temperature, shift)
        spread = BRIER_SHARE * float(np.mean((said - came) ** 2)) if bias else 0.0
        return expected_calibration_error(said, came) + spread

    tried = [(float(t), float(b)) for t in GRID[::2] for b in BIASES] if bias else [(float(t), 0.0) for t in GRID]
    errors = [error(*each) for each in tried]
    least = min(errors)
    good = [each for each, e in zip(tried, errors, strict=True) if e <= least]
    return min(good, key=lambda each: abs(np.log(each[0])) + abs(each[1]))
