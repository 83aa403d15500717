"""When a request's first token is due."""

from __future__ import annotations

from typing import Any

import numpy as np

from deepinfer_core.api import SystemView

Array = np.ndarray[Any, Any]


def due_times(view: SystemView, default: float) -> Array:
    """Of each waiting request: its deadline or its TTFT target, the earlier; ``default`` seconds after arrival if none.

    float64 seconds on the engine's clock. All are finite, and later arrivals have later ones sooner or later, so
    that earliest-first starves nobody.
    """
    waiting = view.waiting
    due = np.minimum(waiting.deadline, waiting.arrival + waiting.ttft_target)
    return np.where(np.isfinite(due), due, waiting.arrival + default)


def postponed(view: SystemView, due: Array, by: float) -> Array:
    """Due times, with those that have passed put off: to serve them first would only make others late as well."""
    return np.where(due < view.now, due + by, due)
