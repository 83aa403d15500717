"""What a step costs, measured while the engine runs: medians by step size, for policies that plan ahead."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Any

import numpy as np

SAMPLES = 9


class StepCost:
    """Median tokens and seconds of the last steps, grouped by tokens rounded up to a power of two."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[tuple[int, float]]] = {}
        self._changed: set[int] = set()
        self._medians: dict[int, tuple[float, float]] = {}
        self._table: np.ndarray[Any, Any] = np.zeros((0, 2))

    def record(self, tokens: int, seconds: float) -> None:
        """Called once a step, so it only takes note."""
        bucket = 1 << max(0, tokens - 1).bit_length()
        samples = self._samples.get(bucket)
        if samples is None:
            samples = self._samples[bucket] = deque(maxlen=SAMPLES)
        samples.append((tokens, seconds))
        self._changed.add(bucket)

    def table(self) -> np.ndarray[Any, Any]:
        """``[[tokens, seconds], ...]`` float64, ascending tokens."""
        if self._changed:
            for bucket in self._changed:
                tokens, seconds = zip(*self._samples[bucket], strict=True)
                self._medians[bucket] = (median(tokens), median(seconds))
            self._changed.clear()
            self._table = np.array([self._medians[bucket] for bucket in sorted(self._medians)], np.float64)
        return self._table
