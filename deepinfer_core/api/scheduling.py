"""Scheduling: the decision points of a step, as preferences.

The planner owns the mechanics (blocks, prefix cache, token budget, chunking, preemption, progress) and
enforces them. A policy answers questions about order and shares; whatever it answers, no block leaks, no
budget is exceeded and every request makes progress. The planner asks only when the answer could have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import attrs

from .provider import LazyRef

if TYPE_CHECKING:
    import numpy as np


@attrs.frozen(kw_only=True)
class RequestView:
    """A request at its arrival. Times are seconds on the engine's monotonic clock.

    ``deadline`` is absolute, or None; ``ttft_target`` and ``tpot_target`` are seconds, or None.
    """

    request_id: str
    arrival: float
    prompt_len: int
    max_tokens: int
    priority: int
    tenant: str
    deadline: float | None
    ttft_target: float | None
    tpot_target: float | None


@attrs.frozen(kw_only=True)
class RequestArrays:
    """Read-only arrays over requests, one entry each, in arrival order. Valid during the call they are passed to.

    Attributes:
        ids: request ids (children of one request share it), looked up as you index them.
        arrival: float64 seconds. prompt, cached, output: int64 tokens; cached is what the prefix cache held when
            it was last looked up: at arrival, and after blocks that the request lacked became findable.
        computed: int64 tokens whose cache rows are written.
        max_tokens: int64. priority: int64, larger is more important.
        tenant: int64 index into ``SystemView.tenants``.
        deadline, ttft_target, tpot_target: float64, inf where none.
        blocks: int64 blocks held (all groups).
    """

    ids: Sequence[str]
    arrival: np.ndarray[Any, Any]
    prompt: np.ndarray[Any, Any]
    cached: np.ndarray[Any, Any]
    computed: np.ndarray[Any, Any]
    output: np.ndarray[Any, Any]
    max_tokens: np.ndarray[Any, Any]
    priority: np.ndarray[Any, Any]
    tenant: np.ndarray[Any, Any]
    deadline: np.ndarray[Any, Any]
    ttft_target: np.ndarray[Any, Any]
    tpot_target: np.ndarray[Any, Any]
    blocks: np.ndarray[Any, Any]


@attrs.frozen(kw_only=True)
class SystemView:
    """The engine as a policy sees it. Arrays are read-only.

    Attributes:
        now: seconds on the engine's monotonic clock.
        step: steps planned so far.
        waiting, running: requests not yet admitted, and admitted ones.
        free_blocks, total_blocks: of the scarcest cache group.
        block_size: tokens.
        max_batch_tokens, max_running: limits of a step.
        tenants: tenant names, indexed by ``RequestArrays.tenant``. A tenant's number may be another in a later view:
            what is remembered of one goes by its name.
        step_cost: ``[[tokens, seconds], ...]`` float64, ascending tokens: medians of the last steps of like size;
            empty before any step.
    """

    now: float
    step: int
    waiting: RequestArrays
    running: RequestArrays
    free_blocks: int
    total_blocks: int
    block_size: int
    max_batch_tokens: int
    max_running: int
    tenants: Sequence[str]
    step_cost: np.ndarray[Any, Any]


@attrs.frozen
class Admit:
    """Answer to ``admit``. A refusal ends the request with ``error`` code ``rejected`` and this reason."""

    accepted: bool
    reason: str = ""


@attrs.frozen
class TokenSplit:
    """Most query tokens this step may spend on decode rows and on prefill chunks.

    The planner clips both to the budget, and schedules at least one row if any request could run.
    """

    decode: int
    prefill: int


EventKind = Literal["queued", "admitted", "scheduled", "preempted", "resumed", "finished", "aborted"]


@attrs.frozen(kw_only=True)
class SchedulingEvent:
    """Something that happened to a request. ``tokens`` is what the kind suggests: prompt, chunk or output length."""

    kind: EventKind
    request_id: str
    time: float
    tokens: int = 0
    tenant: str = ""


class Policy(Protocol):
    """A scheduling policy. One instance per engine; called from the engine's thread only.

    A policy that raises or gives an answer that its question does not allow is not asked again in that step, which
    is planned first come, first served; this is logged and counted.
    """

    def admit(self, request: RequestView, view: SystemView) -> Admit:
        """Asked once, when a request arrives."""
        ...

    def order(self, view: SystemView, k: int) -> Sequence[int]:
        """At most k distinct indices into ``view.waiting``, best first. The rest keep arrival order after them.

        Preempted requests wait with their original arrival. Asked when the waiting set or the free room changed.
        """
        ...

    def split(self, view: SystemView) -> TokenSplit:
        """How this step's token budget is shared, neither part below 0. Asked when both kinds of rows want some."""
        ...

    def victims(self, view: SystemView, need_blocks: int) -> Sequence[int]:
        """Distinct indices into ``view.running``, first to be preempted first.

        The planner preempts from the front until ``need_blocks`` are free, never preempts the last running request,
        and goes on with the newest arrivals.
        """
        ...

    def on_event(self, event: SchedulingEvent) -> None:
        """Told after the fact. Must not raise; what it raises is logged and counted, nothing else."""
        ...


@attrs.frozen(kw_only=True)
class PolicyInfo:
    """Declared by ``deepinfer_scheduling``: a policy users name in ``scheduling.policy``.

    ``factory`` is called with the plugin's settings (or None) and returns a :class:`Policy`.
    """

    name: str
    help: str
    factory: LazyRef
