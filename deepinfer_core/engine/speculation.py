"""Asks a host drafter between steps, checks its answers, and tells drafters what was accepted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from deepinfer_core.api import Drafter, DraftRow, Verified

from .request import Sequence
from .slot_table import SlotTable

if TYPE_CHECKING:
    from .speculation_device import DraftRuntime
    from .step_plan import StepPlan

log = structlog.get_logger("deepinfer.speculation")

Array = np.ndarray[Any, np.dtype[np.int32]]


def accepted_drafts(plan: StepPlan, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """How many drafts of each request count: ``[R]`` int64.

    A draft is accepted iff it equals the token of the row before it; rows after the first that was not accepted saw
    a history that never happened. ``tokens [N]`` are those of the sampled rows.
    """
    accepted = np.zeros(len(plan.slots), np.int64)
    if plan.drafts:
        for request, end in enumerate(np.cumsum(plan.samples).tolist()):
            drafts = plan.drafts.get(int(plan.slots[request]))
            if drafts is not None:
                drawn = tokens[end - len(drafts) - 1 : end - 1]
                accepted[request] = np.logical_and.accumulate(drafts == drawn).sum()
    return accepted


def last_tokens(plan: StepPlan, tokens: np.ndarray[Any, Any], accepted: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The newest token of each request after a step, -1 where none was sampled or none could be drawn: ``[R]``."""
    verified = np.array([len(plan.drafts.get(slot, ())) for slot in plan.slots.tolist()], np.int64)
    where = np.cumsum(plan.samples) - 1 - (verified - accepted)
    if len(tokens) == 0:
        return np.full(len(plan.slots), -1, np.int64)
    newest: np.ndarray[Any, Any] = np.where(plan.samples > 0, tokens[where.clip(min=0)], -1)
    return newest


def judged_places(plan: StepPlan) -> list[tuple[int, int]]:
    """``(slot, number of the draft)`` of the rows that :func:`judged_rows` names, in its order."""
    assert plan.rejects is not None
    return [
        (slot, j)
        for slot, rejects in zip(plan.slots.tolist(), plan.rejects.tolist(), strict=True)
        if rejects
        for j in range(len(plan.drafts.get(slot, ())))
    ]


def judged_rows(plan: StepPlan) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Sampled rows of requests under the rejection rule that a draft follows, and those drafts: ``[J]`` int64 each."""
    rows: list[int] = []
    drafts: list[int] = []
    if plan.rejects is not None and plan.drafts:
        first = (np.cumsum(plan.samples) - plan.samples).tolist()
        for slot, row, rejects in zip(plan.slots.tolist(), first, plan.rejects.tolist(), strict=True):
            tokens = plan.drafts.get(slot) if rejects else None
            if tokens is not None:
                rows += range(row, row + len(tokens))
                drafts += tokens.tolist()
    return np.array(rows, np.int64), np.array(drafts, np.int64)


class Speculator:
    """One drafter in use. Whatever it does wrong costs drafts, never a request."""

    def __init__(self, drafter: Any, *, max_draft_tokens: int, token_limit: int) -> None:
        self.drafter: Drafter = drafter
        self.max_draft_tokens = max_draft_tokens
        self.token_limit = token_limit
        self.proposed = 0
        self.accepted = 0
        self.failures = 0
        self._held: list[Sequence] | None = None

    def propose(self, slots: Array, table: SlotTable) -> dict[int, Array]:
        """Drafts for slots that are one row short of their next token: slot -> tokens, non-empty ones only."""
        slots = slots[table.in_flight[slots] == 0]  # a step that was left behind: its tokens are unknown
        room = np.minimum(table.max_len[slots] - table.length[slots] - 1, self.max_draft_tokens)
        slots, room = slots[room > 0], room[room > 0]
        if len(slots) == 0:
            return {}
        rows = [self._row(table, slot, most) for slot, most in zip(slots.tolist(), room.tolist(), strict=True)]
        try:
            drafts = self.drafter.propose(rows)
            return {
                slot: tokens
                for slot, row, draft in zip(slots.tolist(), rows, drafts, strict=True)
                if len(tokens := self._checked(draft.tokens[: row.max_drafts]))
            }
        except Exception:
            self._failed("propose")
            return {}

    def hold(self) -> None:
        """A step with drafts is being applied: who ends in it is forgotten after the verdict on its drafts."""
        self._held = self._held or []

    def verified(self, results: list[Verified]) -> None:
        self.proposed += sum(r.proposed for r in results)
        self.accepted += sum(r.accepted for r in results)
        if results:
            try:
                self.drafter.verified(results)
            except Exception:
                self._failed("verified")
        held, self._held = self._held, None
        for sequence in held or ():
            self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        if self._held is not None:
            self._held.append(sequence)
            return
        try:
            self.drafter.forget(sequence.request.request_id, sequence.child)
        except Exception:
            self._failed("forget")

    def _row(self, table: SlotTable, slot: int, most: int) -> DraftRow:
        sequence = table.sequence[slot]
        assert sequence is not None
        tokens = table.tokens[slot, : table.committed[slot]]
        tokens.flags.writeable = False
        return DraftRow(
            request_id=sequence.request.request_id,
            child=sequence.child,
            tokens=tokens,
            prompt_len=sequence.prompt_len,
            max_drafts=most,
        )

    def _checked(self, tokens: Any) -> Array:
        """Tokens up to the first that is no token of the vocabulary."""
        array = np.asarray(tokens)
        if array.size == 0:
            return np.zeros(0, np.int32)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise TypeError(f"a draft of shape {array.shape}, {array.dtype}: expected a flat sequence of ids")
        wrong = np.nonzero((array < 0) | (array >= self.token_limit))[0]
        if len(wrong):
            log.warning("drafter proposed an id outside the vocabulary", token=int(array[wrong[0]]))
            array = array[: wrong[0]]
        return array.astype(np.int32)

    def _failed(self, call: str) -> None:
        self.failures += 1
        log.exception("drafter raised", call=call)


class DeviceSpeculator(Speculator):
    """Of a device drafter: it drafts inside the steps, and keeps nothing by completion."""

    runtime: DraftRuntime

    @property
    def failures(self) -> int:
        """Calls that raised, on the host or in a step."""
        return self._host_failures + self.runtime.failures

    @failures.setter
    def failures(self, count: int) -> None:
        self._host_failures = count

    def propose(self, slots: Array, table: SlotTable) -> dict[int, Array]:
        return {}

    def forget(self, sequence: Sequence) -> None:
        pass
