"""Why a request waits: noted when the reason changes, and answered on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .timeline import note

if TYPE_CHECKING:
    from .planner import Planner
    from .request import Request, Sequence


def waits(sequence: Sequence, reason: str, clock: Callable[[], float]) -> None:
    """A sequence was looked at and stays in the queue. Called in steps: costs a comparison unless it is news."""
    if sequence.waiting_for != reason:
        sequence.waiting_for = reason
        note(sequence, clock(), "waiting", reason=reason)


def why_waiting(planner: Planner, request: Request) -> str | None:
    """One line about the first completion of a request that waits; None when none does."""
    waiting = next((s for s in request.sequences if s.status == "waiting"), None)
    if waiting is None:
        return None
    before = planner.waiting.before(waiting)
    reason = waiting.waiting_for
    if before and reason == "queued":
        # Only those that could be next are looked at in a step; the rest wait for what the first waits for.
        reason = f"its turn; the first in the queue waits for {planner.waiting.at(0).waiting_for}"
    blocks = f"{planner.cache.free_blocks} of {planner.cache.total_blocks} cache blocks"
    slots = f"{planner.slots.num_free} of {planner.slots.slots} slots"
    return f"waits for {reason} ({before} before it; free: {blocks}, {slots})"
