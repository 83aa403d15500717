"""Survival of the drafts made, apart for the beginnings of texts, which are harder to foretell than what follows."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

REMEMBERED = 256
"""Drafts of each kind."""


class DraftMemory:
    """``[n]`` survival of single drafts, of requests young and grown."""

    def __init__(self) -> None:
        self._young: deque[Array] = deque(maxlen=REMEMBERED)
        self._grown: deque[Array] = deque(maxlen=REMEMBERED)

    def add(self, chances: Sequence[Array], *, young: bool) -> None:
        """Drafts of one step."""
        (self._young if young else self._grown).extend(chances)

    def count(self, *, young: bool) -> int:
        """Drafts remembered of this kind."""
        return len(self._young if young else self._grown)

    def of(self, *, young: bool) -> Sequence[Array]:
        """Those of this kind; where there are none, the others."""
        own, others = (self._young, self._grown) if young else (self._grown, self._young)
        return own or others

    def typical(self, count: int, *, young: bool) -> list[Array]:
        """``count`` of them, or fewer, that stand for all: from the least likely to the most."""
        remembered = self.of(young=young)
        every = max(1, len(remembered) // count)
        return sorted(remembered, key=lambda chances: float(chances.sum()))[every // 2 :: every][:count]
