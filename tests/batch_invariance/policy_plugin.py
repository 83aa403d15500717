"""A scheduling policy of the tests that does everything the other way round: newest first, smallest chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from deepinfer_core.api import (
    Admit,
    LazyRef,
    PluginInfo,
    PolicyInfo,
    RequestView,
    SchedulingEvent,
    SystemView,
    TokenSplit,
    hookimpl,
)


class Backwards:
    """Newest first; at most five prompt tokens a step; the oldest is preempted first."""

    def __init__(self, settings: Any) -> None:
        pass

    def admit(self, request: RequestView, view: SystemView) -> Admit:
        return Admit(True)

    def order(self, view: SystemView, k: int) -> Sequence[int]:
        newest: list[int] = np.argsort(-view.waiting.arrival, kind="stable")[::-1][:k].tolist()
        return newest

    def split(self, view: SystemView) -> TokenSplit:
        return TokenSplit(decode=view.max_batch_tokens, prefill=5)

    def victims(self, view: SystemView, need_blocks: int) -> Sequence[int]:
        most: list[int] = np.argsort(-view.running.computed, kind="stable").tolist()
        return most

    def on_event(self, event: SchedulingEvent) -> None:
        return None


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name="policy_plugin", help="A policy of the tests")


@hookimpl
def deepinfer_scheduling() -> Sequence[PolicyInfo]:
    return [PolicyInfo(name="backwards", help="Newest first", factory=LazyRef("policy_plugin:Backwards"))]
