"""Making room: which running sequence goes back to waiting when blocks run out.

A preempted sequence loses its blocks and keeps its tokens; when it is admitted again it recomputes them in
chunks, helped by whatever the prefix cache still holds.
"""

from __future__ import annotations

from collections.abc import Callable

from deepinfer_core.api import EventKind

from .kv_cache import KVCache
from .policy_guard import PolicyGuard
from .request import Sequence
from .slot_table import SlotTable
from .waiting import WaitingQueue

Tell = Callable[[EventKind, Sequence, int], None]


class Preemption:
    """Takes blocks from running sequences, in the order the policy prefers.

    Attributes:
        count: preemptions so far.
        needs_drain: something would have been preempted, but a step is still in flight; commit it and plan again.
    """

    def __init__(
        self,
        *,
        guard: PolicyGuard,
        cache: KVCache,
        slots: SlotTable,
        waiting: WaitingQueue,
        tell: Tell,
    ) -> None:
        self.guard = guard
        self.cache = cache
        self.slots = slots
        self.waiting = waiting
        self.tell = tell
        self.count = 0
        self.needs_drain = False

    def make_room(self, slot: int, tokens: int) -> bool:
        """Grow a slot to ``tokens`` tokens, preempting others as needed. False if that cannot be done now."""
        while not self.cache.can_grow(slot, tokens):
            if not self._preempt_one(slot, self.cache.missing_blocks(slot, tokens)):
                return False
        self.cache.grow(slot, tokens)
        return True

    def free_for_oldest(self, ready: list[int], tokens: Callable[[int], int]) -> int | None:
        """Nothing fits: preempt the newest arrivals until the oldest of ``ready`` could hold ``tokens(slot)`` tokens.

        Returns its slot, or None while a step is in flight.
        """
        if self._in_flight():
            return None
        oldest = min(ready, key=lambda slot: self.sequence(slot).number)
        for slot in sorted(self.slots.running.tolist(), key=lambda s: -self.sequence(s).number):
            if self.cache.can_grow(oldest, tokens(oldest)):
                break
            if slot != oldest:
                self.preempt(slot)
        return oldest

    def preempt(self, slot: int) -> None:
        """Send a running sequence back to waiting. Nothing of it may be in flight."""
        sequence = self.sequence(slot)
        self.cache.release(slot)
        self.slots.give_back(slot)
        sequence.status = "waiting"
        sequence.waiting_for = "free cache blocks, after it was preempted"
        sequence.request.metrics.preemptions += 1
        self.count += 1
        self.waiting.add(sequence)
        self.tell("preempted", sequence, len(sequence.tokens))

    def sequence(self, slot: int) -> Sequence:
        sequence = self.slots.sequence[slot]
        assert sequence is not None
        return sequence

    def _in_flight(self) -> bool:
        busy = bool(self.slots.in_flight[self.slots.running].any())
        self.needs_drain |= busy
        return busy

    def _preempt_one(self, for_slot: int, need_blocks: int) -> bool:
        if len(self.slots.running) <= 1 or self._in_flight():
            return False
        slot = self.guard.victims(self.slots.by_arrival(), need_blocks)[0]
        self.preempt(slot)
        return slot != for_slot  # the one that needs room may be first in line itself
