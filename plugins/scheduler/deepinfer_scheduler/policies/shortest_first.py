"""Least work first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from deepinfer_core.api import SchedulingEvent, SystemView
from deepinfer_scheduler.ranking import patient_first_k

from .plain import Plain

MEMORY = 0.9
"""Weight of the past in a tenant's mean answer, when one more ends."""


class ShortestFirst(Plain):
    """By prompt tokens that are not cached, and output tokens that are still to come, as far as can be told."""

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        self._mean: dict[str, float] = {}

    def on_event(self, event: SchedulingEvent) -> None:
        if event.kind == "finished" and event.tokens:
            mean = self._mean.get(event.tenant, float(event.tokens))
            self._mean[event.tenant] = MEMORY * mean + (1 - MEMORY) * event.tokens

    def order(self, view: SystemView, k: int) -> Sequence[int]:
        waiting = view.waiting
        output = waiting.max_tokens
        if self.settings.shortest_first_prediction == "history":
            means = np.array([self._mean.get(tenant, np.inf) for tenant in view.tenants])
            output = np.minimum(output, means[waiting.tenant])
        left = np.maximum(output - waiting.output, 1)
        work = waiting.prompt + waiting.output - waiting.cached + self.settings.shortest_first_output_weight * left
        return patient_first_k(view, work, k, self.settings.patience_s)
