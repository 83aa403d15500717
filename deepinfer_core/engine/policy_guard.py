"""Asks the scheduling policy, and puts up with any answer: what raises or makes no sense costs a preference."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable
from typing import TypeVar

import structlog

from deepinfer_core.api import Admit, Policy, SystemView, TokenSplit

from .request import Request, Sequence
from .views import request_view
from .waiting import WaitingQueue

T = TypeVar("T")
log = structlog.get_logger("deepinfer.planner")

EVERY_RECORD = 16
"""Failures that are logged one by one; after these only every power of two, so that a broken policy fills no disk."""


class PolicyGuard:
    """The policy as the planner asks it.

    A policy that raises or answers nonsense is not asked again in that step: the step is planned first come, first
    served. ``failures`` counts these. ``step`` gives the number of the step being planned.
    """

    def __init__(self, policy: Policy, view: Callable[[], SystemView], step: Callable[[], int]) -> None:
        self.policy = policy
        self.view = view
        self.step = step
        self.failures = 0
        self._failed_in = -1
        self._order: list[int] = []
        self._order_key: tuple[int, int, int] | None = None

    def admit(self, request: Request) -> Admit:
        """A policy that fails admits."""
        try:
            return _admit(self.policy.admit(request_view(request), self.view()))
        except (Exception, SystemExit) as error:
            self._failed("admit", error)
            return Admit(True)

    def split(self, whole: TokenSplit) -> TokenSplit:
        """Shares of the step's tokens; ``whole`` if it failed or left nothing to run."""
        split = self._ask("split", lambda: _split(self.policy.split(self.view())), whole)
        return whole if split.decode == split.prefill == 0 else split

    def candidates(self, waiting: WaitingQueue, k: int, free_blocks: int) -> list[Sequence]:
        """Waiting sequences: the policy's preference, then the next k in arrival order.

        It is asked again only when something that may change its answer has changed.
        """
        key = (waiting.version, k, free_blocks)
        if key != self._order_key:
            count = len(waiting)
            failures = self.failures
            self._order = self._ask("order", lambda: _order(self.policy.order(self.view(), k), count, k), [])
            failed = self.failures != failures or self._failed_in == self.step()
            self._order_key = None if failed else key
        taken = set(self._order)
        rest = (i for i in range(len(waiting)) if i not in taken)
        return [waiting.at(i) for i in itertools.chain(self._order, itertools.islice(rest, k))]

    def victims(self, running: list[int], need_blocks: int) -> list[int]:
        """Of the running slots (oldest arrival first), those to preempt: its answer, then the newest arrivals."""
        count = len(running)
        asked = self._ask(
            "victims", lambda: _indices(self.policy.victims(self.view(), need_blocks), count), list[int]()
        )
        return [running[i] for i in asked] + running[::-1]

    def _ask(self, question: str, ask: Callable[[], T], otherwise: T) -> T:
        if self._failed_in == self.step():
            return otherwise
        try:
            return ask()
        except (Exception, SystemExit) as error:
            self._failed_in = self.step()
            self._failed(question, error)
            return otherwise

    def _failed(self, question: str, error: BaseException) -> None:
        self.failures += 1
        if self.failures <= EVERY_RECORD or self.failures & (self.failures - 1) == 0:
            log.error(
                "scheduling policy failed: first come, first served for this step",
                question=question,
                step=self.step(),
                failures=self.failures,
                error=str(error),
                exc_info=None if isinstance(error, _Nonsense) else error,  # the answer says more than our own frames
            )


class _Nonsense(ValueError):
    """An answer that the contract does not allow."""


def _admit(answer: Admit) -> Admit:
    if not isinstance(answer, Admit):
        raise _Nonsense(f"admit answered {answer!r}: expected an Admit")
    return answer


def _split(answer: TokenSplit) -> TokenSplit:
    if not isinstance(answer, TokenSplit):
        raise _Nonsense(f"split answered {answer!r}: expected a TokenSplit")
    decode, prefill = operator.index(answer.decode), operator.index(answer.prefill)
    if decode < 0 or prefill < 0:
        raise _Nonsense(f"split answered {answer!r}: expected tokens >= 0")
    return TokenSplit(decode, prefill)


def _order(answer: Iterable[int], waiting: int, k: int) -> list[int]:
    order = _indices(answer, waiting)
    if len(order) > k:
        raise _Nonsense(f"order answered {len(order)} indices: expected at most k={k}")
    return order


def _indices(answer: Iterable[int], count: int) -> list[int]:
    """Distinct indices below ``count``."""
    indices = [operator.index(i) for i in itertools.islice(answer, count + 1)]
    wrong = next((i for i in indices if not 0 <= i < count), None)
    if wrong is not None:
        raise _Nonsense(f"answered index {wrong}: expected 0 to {count - 1}")
    if len(set(indices)) != len(indices):
        raise _Nonsense(
            f"answered {len(indices)} indices, {len(set(indices))} of them distinct: expected no repetition"
        )
    return indices
