"""First come, first served: the built-in policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepinfer_core.api import Admit, RequestView, SchedulingEvent, SystemView, TokenSplit


class FirstComeFirstServed:
    """Admit everything, in arrival order; decode rows before prefill chunks; newest arrival preempted first."""

    def __init__(self, settings: Any = None) -> None:
        del settings

    def admit(self, request: RequestView, view: SystemView) -> Admit:
        return Admit(True)

    def order(self, view: SystemView, k: int) -> Sequence[int]:
        return range(min(k, len(view.waiting.ids)))

    def split(self, view: SystemView) -> TokenSplit:
        return TokenSplit(decode=view.max_batch_tokens, prefill=view.max_batch_tokens)

    def victims(self, view: SystemView, need_blocks: int) -> Sequence[int]:
        return range(len(view.running.ids) - 1, -1, -1)  # the view is in arrival order

    def on_event(self, event: SchedulingEvent) -> None:
        return None
