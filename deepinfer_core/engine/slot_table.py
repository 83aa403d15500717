"""The running requests as arrays, one row per slot, so that a step costs a few array operations.

Everything here is the host's view. With the loop one step ahead, ``length`` and ``computed`` include what
was launched but not yet committed; ``committed`` is what the host knows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .request import Sequence

NO_STOP = -1


class SlotTable:
    """Per-slot state of running sequences.

    ``running`` lists the slots that may be scheduled, in order of admission.

    Arrays (``[slots]`` int64 unless stated):
        length: tokens known or being produced. computed: rows whose cache was or is being written.
        committed: tokens the host has seen. prompt_len, max_len: fixed limits; the sequence ends at max_len.
        min_end: no stop below this length. published: blocks already findable.
        in_flight: launched steps not yet committed.
        slack: how many tokens ``length`` and ``computed`` may be too high, as drafts in flight may be rejected.
        unseeded: drawn without a seed of the user's, so that drafts may be judged by rejection.
        last_turn: ascends with the step that last scheduled the slot, and within it with the row, so that rows for
            which there is no room in every step take turns.
        stop_ids: ``[slots, K]``, padded with -1. Of requests that run, all lie in the first ``stop_width`` columns.
        tokens: ``[slots, width]`` int32.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.sequence: list[Sequence | None] = [None] * slots
        self._free = list(range(slots - 1, -1, -1))
        self.running = np.zeros(0, np.int64)
        self.length = np.zeros(slots, np.int64)
        self.computed = np.zeros(slots, np.int64)
        self.committed = np.zeros(slots, np.int64)
        self.prompt_len = np.zeros(slots, np.int64)
        self.max_len = np.zeros(slots, np.int64)
        self.min_end = np.zeros(slots, np.int64)
        self.in_flight = np.zeros(slots, np.int64)
        self.slack = np.zeros(slots, np.int64)
        self.unseeded = np.zeros(slots, bool)
        self.last_turn = np.zeros(slots, np.int64)
        self.published = np.zeros(slots, np.int64)
        self.finished = np.zeros(slots, bool)
        self.needs_host = np.zeros(slots, bool)
        self.stop_ids = np.full((slots, 4), NO_STOP, np.int64)
        self.stop_width = 0
        self._stop_count = np.zeros(slots, np.int64)
        self.tokens = np.zeros((slots, 256), np.int32)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, sequence: Sequence, computed: int) -> int:
        """Move a waiting sequence into a free slot; its first ``computed`` tokens are in the cache."""
        slot = self._free.pop()
        request, known = sequence.request, len(sequence.tokens)
        self._widen(request.max_len, len(request.stop_token_ids))
        self.sequence[slot] = sequence
        self.tokens[slot, :known] = sequence.tokens
        self.length[slot] = self.committed[slot] = known
        self.computed[slot] = computed
        self.prompt_len[slot] = sequence.prompt_len
        self.max_len[slot] = request.max_len
        self.min_end[slot] = sequence.prompt_len + request.params.min_tokens
        self.in_flight[slot] = 0
        self.slack[slot] = 0
        self.unseeded[slot] = request.params.seed is None and not request.params.is_greedy
        self.last_turn[slot] = 0
        self.finished[slot] = False
        self.published[slot] = 0
        self.needs_host[slot] = sequence.needs_host
        self.stop_ids[slot] = NO_STOP
        self.stop_ids[slot, : len(request.stop_token_ids)] = request.stop_token_ids
        self._stop_count[slot] = len(request.stop_token_ids)
        self.stop_width = int(self._stop_count.max())
        self.running = np.append(self.running, slot)
        sequence.slot = slot
        sequence.status = "running"
        return slot

    def give_back(self, slot: int) -> None:
        """Free a slot; the sequence keeps its committed tokens."""
        sequence = self.sequence[slot]
        assert sequence is not None
        assert self.in_flight[slot] == 0, "a step of this slot is still in flight"
        sequence.tokens = self.tokens[slot, : self.committed[slot]].copy()
        sequence.slot = -1
        self.sequence[slot] = None
        self._stop_count[slot] = 0
        self.stop_width = int(self._stop_count.max())
        self.retire(slot)
        self._free.append(slot)

    def retire(self, slot: int) -> None:
        """No further step for this slot; it keeps its row until nothing of it is in flight."""
        self.running = self.running[self.running != slot]

    def scheduled(self, slots: np.ndarray[Any, Any], step: int) -> None:
        """Rows of these slots, in this order, run in a step."""
        self.last_turn[slots] = step * self.slots + np.arange(len(slots))

    def by_arrival(self) -> list[int]:
        """The running slots, oldest arrival first: a request that was preempted keeps its place."""
        numbers = {slot: s.number for slot, s in enumerate(self.sequence) if s is not None}
        return sorted(self.running.tolist(), key=numbers.__getitem__)

    def output_ids(self, sequence: Sequence) -> list[int]:
        """Output tokens known to the host."""
        slot = sequence.slot
        known = sequence.tokens if slot < 0 else self.tokens[slot, : self.committed[slot]]
        ids: list[int] = known[sequence.prompt_len :].tolist()
        return ids

    def output_len(self, sequence: Sequence) -> int:
        known = len(sequence.tokens) if sequence.slot < 0 else int(self.committed[sequence.slot])
        return known - sequence.prompt_len

    def _widen(self, width: int, stops: int) -> None:
        have = self.tokens.shape[1]
        if width > have:
            self.tokens = np.pad(self.tokens, ((0, 0), (0, max(width, 2 * have) - have)))
        if stops > self.stop_ids.shape[1]:
            more = stops - self.stop_ids.shape[1]
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, more)), constant_values=NO_STOP)
