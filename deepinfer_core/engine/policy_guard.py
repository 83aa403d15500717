"""Asks the scheduling policy, and puts up with any answer: what raises or makes no sense costs a preference."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeVar

import structlog

from deepinfer_core.api import Admit, Policy, SystemView, TokenSplit

from .request import Request, Sequence
from .views import request_view
from .waiting import WaitingQueue

T = TypeVar("T")
log = structlog.get_logger("deepinfer.planner")


class PolicyGuard:
    """The policy as the planner asks it. ``failures`` counts how often it raised."""

    def __init__(self, policy: Policy, view: Callable[[], SystemView]) -> None:
        self.policy = policy
        self.view = view
        self.failures = 0
        self._order: list[int] = []
        self._order_key: tuple[int, int, int] | None = None

    def admit(self, request: Request) -> Admit:
        """A policy that raises admits."""
        return self._ask("admit", lambda: self.policy.admit(request_view(request), self.view()), Admit(True))

    def split(self, whole: TokenSplit) -> TokenSplit:
        """Shares of the step's tokens, none negative; ``whole`` if it raised or left nothing to run."""
        split = self._ask("split", lambda: self.policy.split(self.view()), whole)
        if split.decode <= 0 and split.prefill <= 0:
            return whole
        return TokenSplit(max(split.decode, 0), max(split.prefill, 0))

    def candidates(self, waiting: WaitingQueue, k: int, free_blocks: int) -> list[Sequence]:
        """Waiting sequences: the policy's preference, then the next k in arrival order.

        It is asked again only when something that may change its answer has changed.
        """
        key = (waiting.version, k, free_blocks)
        if key != self._order_key:
            self._order = self._ask("order", lambda: self._ask_order(len(waiting), k), [])
            self._order_key = key
        taken = set(self._order)
        rest = (i for i in range(len(waiting)) if i not in taken)
        return [waiting.at(i) for i in itertools.chain(self._order, itertools.islice(rest, k))]

    def victims(self, running: list[int], need_blocks: int) -> list[int]:
        """Of the running slots (oldest arrival first), those to preempt: its answer, then the newest arrivals."""
        asked: list[int] = self._ask(
            "victims", lambda: list(self.policy.victims(self.view(), need_blocks)), list[int]()
        )
        return [running[i] for i in asked if 0 <= i < len(running)] + running[::-1]

    def _ask_order(self, waiting: int, k: int) -> list[int]:
        answer = dict.fromkeys(int(i) for i in self.policy.order(self.view(), k) if 0 <= i < waiting)
        return list(answer)[:k]

    def _ask(self, question: str, ask: Callable[[], T], otherwise: T) -> T:
        try:
            return ask()
        except Exception:
            self.failures += 1
            log.exception("scheduling policy raised", question=question)
            return otherwise
