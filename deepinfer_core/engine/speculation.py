"""Asks the drafter between steps, checks its answers, and tells it what was accepted."""

from __future__ import annotations

from typing import Any

import numpy as np
import structlog

from deepinfer_core.api import Drafter, DraftRow, Verified

from .request import Sequence
from .slot_table import SlotTable

log = structlog.get_logger("deepinfer.speculation")

Array = np.ndarray[Any, np.dtype[np.int32]]


class Speculator:
    """One drafter in use. Whatever it does wrong costs drafts, never a request."""

    def __init__(self, drafter: Drafter, *, max_draft_tokens: int, token_limit: int) -> None:
        self.drafter = drafter
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
