"""Policies that each break one rule, and the check that must say so."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from deepinfer_core.api import Admit, RequestView, SchedulingEvent, SystemView, TokenSplit
from deepinfer_core.engine.fcfs import FirstComeFirstServed


class Drops(FirstComeFirstServed):
    def admit(self, request: RequestView, view: SystemView) -> Admit:
        return Admit(request.prompt_len < 90, "too long for me")


class RefusesSilently(FirstComeFirstServed):
    def admit(self, request: RequestView, view: SystemView) -> Admit:
        return Admit(request.priority >= 0)


class Duplicates(FirstComeFirstServed):
    def order(self, view: SystemView, k: int) -> Sequence[int]:
        return [0, *super().order(view, k)][:k]


class OutOfRange(FirstComeFirstServed):
    def order(self, view: SystemView, k: int) -> Sequence[int]:
        return [*range(min(k, len(view.waiting.ids)) - 1), len(view.waiting.ids)]


class TooMany(FirstComeFirstServed):
    def order(self, view: SystemView, k: int) -> Sequence[int]:
        return range(len(view.waiting.ids))


class StarvesTheOldest(FirstComeFirstServed):
    def order(self, view: SystemView, k: int) -> Sequence[int]:
        count = len(view.waiting.ids)
        return range(count - 1, max(count - 1 - k, -1), -1)


class StarvesLowPriority(FirstComeFirstServed):
    def order(self, view: SystemView, k: int) -> Sequence[int]:
        return [int(i) for i in np.argsort(-view.waiting.priority, kind="stable")[:k]]


class OverBudget(FirstComeFirstServed):
    def split(self, view: SystemView) -> TokenSplit:
        return TokenSplit(view.max_batch_tokens, view.max_batch_tokens + 1)


class Negative(FirstComeFirstServed):
    def split(self, view: SystemView) -> TokenSplit:
        return TokenSplit(-1, view.max_batch_tokens)


class Raises(FirstComeFirstServed):
    def order(self, view: SystemView, k: int) -> Sequence[int]:
        view.waiting.prompt.argmin()  # there may be none
        return super().order(view, k)


class RaisesWhenBusy(FirstComeFirstServed):
    def split(self, view: SystemView) -> TokenSplit:
        if len(view.waiting.ids) > 20:
            raise RuntimeError("too much for me")
        return super().split(view)


class Exits(FirstComeFirstServed):
    def order(self, view: SystemView, k: int) -> Sequence[int]:
        raise SystemExit(3)


class RaisesOnEvents(FirstComeFirstServed):
    def on_event(self, event: SchedulingEvent) -> None:
        if event.kind == "aborted":
            raise KeyError(event.request_id)


class Writes(FirstComeFirstServed):
    def order(self, view: SystemView, k: int) -> Sequence[int]:
        view.waiting.priority[:] = 0
        return super().order(view, k)


class Sleeps(FirstComeFirstServed):
    def split(self, view: SystemView) -> TokenSplit:
        if len(view.waiting.ids) >= 5000:
            time.sleep(0.15)
        return super().split(view)


class NoVictims(FirstComeFirstServed):
    def victims(self, view: SystemView, need_blocks: int) -> Sequence[int]:
        return []


class SameVictim(FirstComeFirstServed):
    def victims(self, view: SystemView, need_blocks: int) -> Sequence[int]:
        return [0] * len(view.running.ids)


class Random(FirstComeFirstServed):
    def order(self, view: SystemView, k: int) -> Sequence[int]:
        return np.random.default_rng().permutation(len(view.waiting.ids))[:k].tolist()  # type: ignore[no-any-return]


class WrongTypes(FirstComeFirstServed):
    def split(self, view: SystemView) -> Any:
        return (view.max_batch_tokens, view.max_batch_tokens)


BROKEN = {
    Drops: "drops",
    RefusesSilently: "admit",
    Duplicates: "order",
    OutOfRange: "order",
    TooMany: "order",
    StarvesTheOldest: "starves",
    StarvesLowPriority: "starves",
    OverBudget: "split",
    Negative: "split",
    Raises: "raises",
    RaisesWhenBusy: "raises",
    Exits: "raises",
    RaisesOnEvents: "raises",
    Writes: "raises",
    Sleeps: "slow",
    NoVictims: "victims",
    SameVictim: "victims",
    Random: "deterministic",
    WrongTypes: "split",
}
