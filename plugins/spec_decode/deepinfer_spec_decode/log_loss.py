"""Weights of a survival's last factor with the least log loss: Fisher scoring."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

LARGEST_LOGIT = 60.0
ROUNDS, HALVINGS = 60, 20
LEAST_GAIN = 1e-10
PRIOR = 0.01
"""Drafts' worth of belief in the weights begun with: few drafts may be told apart entirely."""


def least_log_loss(before: Array, features: Array, came: Array, start: Array, bounds: tuple[float, float]) -> Array:
    """Weights w ``[m]`` of ``before * sigmoid(features @ w)``, the chance that ``came``.

    Args:
        before: ``[N]`` float64 survival so far. features: ``[N, m]`` float64. came: ``[N]`` bool.
        start: ``[m]`` to begin at. bounds: of the first weight.
    """
    w, loss = start.astype(np.float64), _loss(before, features, came, start, start)
    for _ in range(ROUNDS):
        p = sigmoid(features @ w)
        said = np.minimum(before * p, 1 - 1e-12)
        slope = np.where(came, p - 1, said * (1 - p) / (1 - said))
        gradient = features.T @ slope + PRIOR * (w - start)
        fisher = (features * (said * (1 - p) ** 2 / (1 - said))[:, None]).T @ features
        free = np.ones(len(w), bool)
        free[0] = not ((w[0] <= bounds[0] and gradient[0] > 0) or (w[0] >= bounds[1] and gradient[0] < 0))
        step = np.zeros(len(w))
        step[free] = np.linalg.solve(fisher[np.ix_(free, free)] + PRIOR * np.eye(int(free.sum())), gradient[free])
        gained = 0.0
        for halving in range(HALVINGS):
            tried = w - step / 2**halving
            tried[0] = np.clip(tried[0], *bounds)
            found = _loss(before, features, came, tried, start)
            if found < loss:
                gained, w, loss = loss - found, tried, found
                break
        if gained < LEAST_GAIN * len(came):
            break
    return w


def sigmoid(x: Array) -> Array:
    """The argument kept within +-60."""
    result: Array = 1 / (1 + np.exp(-np.clip(x, -LARGEST_LOGIT, LARGEST_LOGIT)))
    return result


def _loss(before: Array, features: Array, came: Array, w: Array, start: Array) -> float:
    said = np.clip(before * sigmoid(features @ w), 1e-12, 1 - 1e-12)
    return float(-np.log(np.where(came, said, 1 - said)).sum() + PRIOR / 2 * ((w - start) ** 2).sum())
