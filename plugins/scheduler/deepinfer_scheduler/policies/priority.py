"""Classes of priority with ageing."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_core.api import SystemView
from deepinfer_scheduler.ranking import first_k

from .plain import Plain


class Priority(Plain):
    """The highest priority first. Every ``priority_ageing_s`` seconds of waiting are worth one class."""

    def order(self, view: SystemView, k: int) -> Sequence[int]:
        waiting = view.waiting
        return first_k((waiting.arrival - view.now) / self.settings.priority_ageing_s - waiting.priority, k)

    def victims(self, view: SystemView, need_blocks: int) -> Sequence[int]:
        """The lowest class first, in it the newest."""
        newest_first = view.running.priority[::-1]
        last = len(newest_first) - 1
        return [last - i for i in first_k(newest_first, len(newest_first))]
