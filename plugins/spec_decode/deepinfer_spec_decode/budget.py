"""How many drafts to verify, and whose (DSpark, arXiv:2607.05147 section 5): plain functions over arrays.

``survival [R, n]`` is the chance that a request's first j+1 drafts are all accepted. Verifying K drafts over R requests
takes a step of ``R + K`` rows and yields ``R + (sum of their survival)`` tokens. Sought are the most tokens a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Cost = Callable[[Array], Array]
"""Rows of a step ``[m]`` -> seconds ``[m]``; infinite where no such step can run."""


def usable(survival: Array, caps: Array) -> Array:
    """``[R, n]`` float64 in [0, 1], never increasing along a request, 0 beyond its cap; NaN counts as 0."""
    clean = np.nan_to_num(np.asarray(survival, np.float64), nan=0.0, posinf=1.0, neginf=0.0).clip(0.0, 1.0)
    clean = np.minimum.accumulate(clean, axis=1) if clean.shape[1] else clean
    kept: Array = np.where(np.arange(clean.shape[1]) < np.asarray(caps)[:, None], clean, 0.0)
    return kept


def throughput(survival: Array, caps: Array, rows: int, cost: Cost) -> Array:
    """Tokens a second when the best 0, 1, 2, ... drafts are verified: ``[m + 1]`` for m drafts that can survive."""
    chances = usable(survival, caps).ravel()
    best = np.sort(chances[chances > 0])[::-1]
    expected = rows + np.concatenate([[0.0], np.cumsum(best)])
    result: Array = expected / cost(rows + np.arange(len(expected)))
    return result


def global_budget(survival: Array, caps: Array, rows: int, cost: Cost) -> int:
    """The number of drafts with the highest throughput, the smallest of equals.

    Losslessness: only for survivals of earlier drafts than those to be verified. A draft's own survival depends on the
    drafts before it, so a search that looks past it would let later drafts decide whether an earlier one is verified.
    """
    return int(np.argmax(throughput(survival, caps, rows, cost)))


def early_stop_budget(survival: Array, caps: Array, rows: int, cost: Cost) -> int:
    """The number of drafts before the first that does not raise throughput."""
    rates = throughput(survival, caps, rows, cost)
    fails = np.nonzero(~(rates[1:] > rates[:-1]))[0]
    return int(fails[0]) if len(fails) else len(rates) - 1


def allocate(survival: Array, caps: Array, total: int) -> Array:
    """``total`` drafts to those most likely to survive: ``[R]`` int64 counts, at most ``caps``.

    Survival never increases along a request, so its drafts are taken from the first on. Ties go to the lower request.
    Drafts that cannot survive are taken last.
    """
    chances = usable(survival, caps)
    width = chances.shape[1]
    allowed = (np.arange(width) < np.asarray(caps)[:, None]).ravel()
    order = np.argsort(np.where(allowed, -chances.ravel(), np.inf), kind="stable")
    taken = order[: min(total, int(allowed.sum()))]
    counts: Array = np.bincount(taken // max(width, 1), minlength=len(chances)).astype(np.int64)
    return counts


def gain(seen: Array, requests: int, cost: Cost, drafting: float) -> float:
    """Tokens a second with drafts over those without, were ``requests`` to be drafted for in every step.

    Args:
        seen: ``[N, n]`` survival of drafts made lately, by request. Requests to come are taken to be like these.
        drafting: seconds of drafting for so many requests.
    """
    n = seen.shape[1]
    repeated = np.resize(np.arange(len(seen)), -(-len(seen) // requests) * requests)
    chances = -np.sort(-seen[repeated].reshape(-1, requests * n), axis=1)
    expected = requests + np.pad(np.cumsum(chances, axis=1), ((0, 0), (1, 0)))
    seconds = cost(requests + np.arange(requests * n + 1))
    best = (expected / (seconds + drafting)).argmax(axis=1)
    tokens = float(np.take_along_axis(expected, best[:, None], 1).sum())
    spent = float(seconds[best].sum()) + len(best) * drafting
    return tokens / spent * float(seconds[0]) / requests
