"""The answers of first come, first served: what a policy has no opinion about."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_core.api import Admit, RequestView, SchedulingEvent, SystemView, TokenSplit
from deepinfer_scheduler.settings import SchedulerSettings


class Plain:
    """Base of the policies here; each overrides the questions it answers differently."""

    def __init__(self, settings: SchedulerSettings | None = None) -> None:
        self.settings = settings or SchedulerSettings()

    def admit(self, request: RequestView, view: SystemView) -> Admit:
        return Admit(True)

    def order(self, view: SystemView, k: int) -> Sequence[int]:
        return range(min(k, len(view.waiting.ids)))

    def split(self, view: SystemView) -> TokenSplit:
        return TokenSplit(decode=view.max_batch_tokens, prefill=view.max_batch_tokens)

    def victims(self, view: SystemView, need_blocks: int) -> Sequence[int]:
        return range(len(view.running.ids) - 1, -1, -1)

    def on_event(self, event: SchedulingEvent) -> None:
        return None
