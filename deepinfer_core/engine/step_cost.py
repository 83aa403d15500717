"""What a step costs, measured while the engine runs: medians by step size, for policies that plan ahead."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Any

import numpy as np

SAMPLES = 9


class StepCost:
    """Median seconds per step, by number of query tokens rounded up to a power of two."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._table: np.ndarray[Any, Any] | None = None

    def record(self, tokens: int, seconds: float) -> None:
        """Called once a step, so it costs one small sort."""
        bucket = 1 << max(0, tokens - 1).bit_length()
        samples = self._samples.setdefault(bucket, deque(maxlen=SAMPLES))
        samples.append(seconds)
        self._medians[bucket] = median(samples)
        self._table = None

    def table(self) -> np.ndarray[Any, Any]:
        """``[[tokens, seconds], ...]`` float64, ascending tokens."""
        if self._table is None:
            self._table = np.array(sorted(self._medians.items()), np.float64).reshape(-1, 2)
        return self._table
