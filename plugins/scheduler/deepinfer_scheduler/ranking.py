"""The best few of thousands, with ties in order of arrival and nobody left waiting for ever."""

from __future__ import annotations

from typing import Any

import numpy as np

from deepinfer_core.api import RequestArrays, SystemView

Array = np.ndarray[Any, Any]


def first_k(score: Array, k: int) -> list[int]:
    """Indices of the k smallest scores, ascending; of equal ones the first. Costs a partition, not a sort."""
    if k <= 0:
        return []
    if k >= len(score):
        return [int(i) for i in np.argsort(score, kind="stable")]
    threshold = np.partition(score, k - 1)[k - 1]
    below = np.flatnonzero(score < threshold)
    level = np.flatnonzero(score == threshold)[: k - len(below)]
    chosen = np.sort(np.concatenate([below, level]))
    return [int(i) for i in chosen[np.argsort(score[chosen], kind="stable")]]


def patient_first_k(view: SystemView, score: Array, k: int, patience: float) -> list[int]:
    """As :func:`first_k`, but behind whoever has waited for ``patience`` seconds, in order of arrival."""
    over = np.flatnonzero(view.now - view.waiting.arrival >= patience)
    if not len(over):
        return first_k(score, k)
    score = score.astype(np.float64)
    score[over] = -np.inf
    return first_k(score, k)


def decoding(running: RequestArrays) -> Array:
    """Mask of the running requests that produce token after token: all but the last token's row is computed."""
    mask: Array = (running.output > 0) & (running.computed >= running.prompt + running.output - 1)
    return mask
