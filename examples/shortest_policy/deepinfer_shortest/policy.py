"""The policy. It answers questions about order and shares; the planner keeps every limit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepinfer_core.api import Admit, RequestView, SchedulingEvent, SystemView, TokenSplit

from .plugin import ShortestSettings


class Shortest:
    """Fewest prompt tokens left to compute first; requests out of patience before all others, oldest first."""

    def __init__(self, settings: ShortestSettings) -> None:
        self.patience = settings.patience

    def admit(self, request: RequestView, view: SystemView) -> Admit:
        return Admit(True)

    def order(self, view: SystemView, k: int) -> Sequence[int]:
        waiting = view.waiting
        impatient = view.now - waiting.arrival >= self.patience
        rank = np.where(impatient, waiting.arrival, waiting.prompt - waiting.cached)
        best: list[int] = np.lexsort((rank, ~impatient))[:k].tolist()
        return best

    def split(self, view: SystemView) -> TokenSplit:
        return TokenSplit(decode=view.max_batch_tokens, prefill=view.max_batch_tokens)

    def victims(self, view: SystemView, need_blocks: int) -> Sequence[int]:
        """Those with the least to compute again."""
        cheapest: list[int] = np.argsort(view.running.computed, kind="stable").tolist()
        return cheapest

    def on_event(self, event: SchedulingEvent) -> None:
        return None
