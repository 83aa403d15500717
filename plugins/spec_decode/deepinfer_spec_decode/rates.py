"""How often drafts were accepted, by position: the confidence of drafters that have none of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from deepinfer_core.api import Verified

PRIOR_TRIED, PRIOR_ACCEPTED = 4.0, 3.0
"""What is assumed before anything was seen."""


MEMORY = 48
"""Drafts remembered, so that a few probes of drafting that has stopped can tell that the text is another."""


class AcceptanceRates:
    """Conditional acceptance rates of the last ``memory`` drafts or so."""

    def __init__(self, depth: int, memory: float = MEMORY) -> None:
        self._tried = np.full(depth, PRIOR_TRIED)
        self._accepted = np.full(depth, PRIOR_ACCEPTED)
        self._memory = memory

    def learn(self, results: Sequence[Verified]) -> None:
        """Draft j was tried iff all before it were accepted and it was proposed."""
        for result in results:
            tried = min(result.accepted + 1, result.proposed)
            self._tried[:tried] += 1
            self._accepted[: result.accepted] += 1
        kept = np.minimum(1.0, self._memory / self._tried)
        self._tried *= kept
        self._accepted *= kept

    def confidence(self) -> np.ndarray[Any, Any]:
        """``[depth]`` float32: chance that draft j is accepted if all before it are."""
        rates: np.ndarray[Any, Any] = (self._accepted / self._tried).astype(np.float32)
        return rates
