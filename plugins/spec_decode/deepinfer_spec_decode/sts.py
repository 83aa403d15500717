"""Sequential temperature scaling: make what a drafter says of its drafts come true (arXiv:2607.05147, section 4).

A draft's survival is the product of the confidences up to it. Position by position, one temperature of the confidence's
logit is chosen so that the survival so far has the smallest expected calibration error, those before it fixed.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

Array = np.ndarray[Any, Any]

BINS = 10
GRID = np.exp(np.linspace(np.log(0.2), np.log(5.0), 81))
"""Temperatures tried; 1 is among them."""

LARGEST_LOGIT = 60.0
FEWEST = 50
"""Drafts of a position below which its temperature stays that of the position before it."""


def tempered(logits: Array, temperature: float) -> Array:
    """``sigmoid(logit / T)``, the argument kept within +-60."""
    result: Array = 1 / (1 + np.exp(-np.clip(logits / temperature, -LARGEST_LOGIT, LARGEST_LOGIT)))
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
    total = 0.0
    for bin_ in range(BINS):
        inside = bins == bin_
        if inside.any():
            total += abs(float(said[inside].mean()) - float(came[inside].mean())) * int(inside.sum())
    return total / len(said)


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

    def outcomes(self, temperatures: tuple[float, ...]) -> list[tuple[Array, Array]]:
        """By position: the survival said, and whether the draft was accepted, over the drafts that reached so far."""
        found = []
        product = np.ones(len(self.logits))
        for k in range(self.logits.shape[1]):
            product = product * tempered(self.logits[:, k], temperatures[min(k, len(temperatures) - 1)])
            there = ~np.isnan(self.logits[:, k])
            found.append((product[there], (self.accepted > k)[there]))
        return found

    def error(self, temperatures: tuple[float, ...]) -> float:
        """Expected calibration error over all positions together."""
        pairs = self.outcomes(temperatures)
        if not pairs:
            return 0.0
        return expected_calibration_error(np.concatenate([s for s, _ in pairs]), np.concatenate([c for _, c in pairs]))


def fit(records: Records) -> tuple[float, ...]:
    """One temperature for each position, left to right."""
    temperatures: list[float] = []
    product = np.ones(len(records.logits))
    for k in range(records.logits.shape[1]):
        there = ~np.isnan(records.logits[:, k])
        before, logits, came = product[there], records.logits[there, k], (records.accepted > k)[there]
        best = temperatures[-1] if temperatures else 1.0
        if int(there.sum()) >= FEWEST:
            errors = [expected_calibration_error(before * tempered(logits, t), came) for t in GRID]
            least = min(errors)
            # Of equally good ones the one that changes least.
            best = float(
                min((t for t, e in zip(GRID, errors, strict=True) if e <= least), key=lambda t: abs(np.log(t)))
            )
        temperatures.append(best)
        product = product * tempered(records.logits[:, k], best)
    return tuple(temperatures)
