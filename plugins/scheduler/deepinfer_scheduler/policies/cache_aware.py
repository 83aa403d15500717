"""Longest cached prefix first."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_core.api import SystemView
from deepinfer_scheduler.ranking import patient_first_k

from .plain import Plain


class CacheAware(Plain):
    """Requests whose prefix is cached run before it is evicted; nobody waits longer than ``patience_s`` for that."""

    def order(self, view: SystemView, k: int) -> Sequence[int]:
        return patient_first_k(view, -view.waiting.cached, k, self.settings.patience_s)
