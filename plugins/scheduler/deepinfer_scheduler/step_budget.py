"""How large a step may be for its predicted time to stay below a limit."""

from __future__ import annotations

from typing import Any

import numpy as np

ROUNDING = 1e-6
"""Tokens that a sum of float64 may fall short of a whole number by."""


def most_tokens(step_cost: np.ndarray[Any, Any], seconds: float, limit: int) -> int | None:
    """Tokens of the largest step predicted to take at most ``seconds``, at most ``limit``; None before any step.

    The table (``[[tokens, seconds], ...]``, see ``SystemView.step_cost``) is taken as a line from point to point,
    made to rise, and continued beyond its last point with the slope of its last two.
    """
    if not len(step_cost):
        return None
    tokens, cost = step_cost[:, 0], np.maximum.accumulate(step_cost[:, 1])
    if seconds < cost[0]:
        return 0
    last = len(tokens) - 1
    if seconds >= cost[last]:
        before = (tokens[last - 1], cost[last - 1]) if last else (0.0, 0.0)
        slope = (cost[last] - before[1]) / (tokens[last] - before[0])
        beyond = (seconds - cost[last]) / slope if slope > 0 else np.inf
        return int(min(limit, tokens[last] + beyond + ROUNDING))
    i = int(np.searchsorted(cost, seconds, "right"))
    share = (seconds - cost[i - 1]) / (cost[i] - cost[i - 1])
    return int(min(limit, tokens[i - 1] + share * (tokens[i] - tokens[i - 1]) + ROUNDING))
