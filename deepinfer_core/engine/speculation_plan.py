"""The host's part of drafting on the device: how many drafts a step may verify, before their tokens are known.

A step is planned as if every draft were accepted. Where the step before it is still in flight, its starts are upper
bounds; the closure moves them back (``speculation_device.py``) and the commit moves the slot table back.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from deepinfer_core.api import FRESH_TOKENS, DraftSchedule, VerifyCost

from .kv_cache import KVCache
from .slot_table import SlotTable

Array = np.ndarray[Any, Any]


@attrs.frozen(kw_only=True)
class DraftTurn:
    """A step's part in speculation. Arrays run over its R requests.

    Attributes:
        caps: drafts that each may verify; the plan's counts include them. total: how many in all.
        floating: the start assumes that every draft of the step before is accepted.
        room: blocks are there for the drafter's own rows. propose: whether to draft for the next step.
        rejects: whose new drafts will be judged by rejection; None: nobody's.
    """

    caps: Array
    total: int
    floating: Array
    room: Array
    propose: bool
    rejects: Array | None


def survival(confidence: Array) -> Array:
    """``[R, n]`` chances that a draft is accepted if those before it are -> ``[R, n]`` float64 that all up to it are.

    What is no probability counts as the nearest one, NaN as 0.
    """
    chances = np.nan_to_num(confidence.astype(np.float64), nan=0.0, posinf=1.0, neginf=0.0).clip(0.0, 1.0)
    product: Array = np.cumprod(chances, axis=1)
    return product


def first_come(caps: Array, total: int) -> Array:
    """``total`` drafts given to the requests in their order: ``[R]`` counts."""
    before = np.cumsum(caps) - caps
    counts: Array = np.clip(total - before, 0, caps)
    return counts


ASKED_EACH = 8
"""Steps without drafts, of the same requests, of which the schedule is asked in one whether to draft again."""


class DraftPlanner:
    """Plans verification for a device drafter.

    Args:
        depth: most drafts of one request. reserve: cache rows that the drafter writes past the newest token; 0: none.
        schedule: of ``speculation.schedule = "confidence"``, or None: verify every draft.
        judges_by_rejection: drafts of requests without a seed may be judged by rejection sampling.
    """

    def __init__(
        self,
        *,
        cache: KVCache,
        slots: SlotTable,
        depth: int,
        max_model_len: int,
        reserve: int,
        schedule: DraftSchedule | None,
        judges_by_rejection: bool,
    ) -> None:
        self.cache = cache
        self.slots = slots
        self.depth = depth
        self.max_model_len = max_model_len
        self.reserve = reserve
        self.schedule = schedule
        self.judges_by_rejection = judges_by_rejection
        self.steps = 0
        self.verified_budget = 0
        self._offered = np.zeros(slots.slots, bool)
        self._survival = np.ones((slots.slots, depth))
        self._turns = 0
        self._last_turn = np.zeros(slots.slots, np.int64)
        self._idle: DraftTurn | None = None  # of the step before, if nothing was drafted in it
        self._idle_steps = 0

    def caps(self, decodes: Array, budget: int) -> tuple[Array, int]:
        """Most drafts of each decoding slot, their blocks owned, and how many may be verified in all.

        ``budget``: rows the step has left. Drafts preempt nobody.
        """
        if budget <= 0 or not self._offered[decodes].any():
            return np.zeros(len(decodes), np.int64), 0
        table = self.slots
        length = table.length[decodes]
        caps: Array = np.minimum(table.max_len[decodes] - length - 1, self.depth).clip(min=0)
        caps = np.where(self._offered[decodes], caps, 0)
        if not caps.any():
            return np.zeros_like(caps), 0
        total = min(budget, int(caps.sum()))
        if self.schedule is not None:
            known = self._survival[decodes] * (np.arange(self.depth) < caps[:, None])
            delayed = not self._judges_own(decodes, caps)
            total = min(total, max(0, self.schedule.budget(known, caps, len(decodes), delayed=delayed)))
        if total == 0:
            return np.zeros_like(caps), 0
        for i, slot in enumerate(decodes.tolist()):
            caps[i] = max(0, min(int(caps[i]), self.cache.most_tokens(slot) - int(length[i])))
            if caps[i]:
                self.cache.grow(slot, int(length[i] + caps[i]))
        total = min(total, int(caps.sum()))
        self.steps += 1
        self.verified_budget += total
        return caps, total

    def _judges_own(self, decodes: Array, caps: Array) -> bool:
        """Whether the survival of some row under the rejection rule is that of the very drafts it may verify now.

        While the step that makes those is in flight, it is that of the drafts before them. Where every step was
        committed, as in the synchronous loop or after a drain, it is their own.
        """
        if not self.judges_by_rejection:
            return False
        table = self.slots
        own = table.unseeded[decodes] & (caps > 0) & (table.in_flight[decodes] == 0)
        return bool(own.any())

    def turn(self, slots: Array, tops: Array, samples: Array, caps: Array, total: int, waiting: int) -> DraftTurn:
        """The plan is otherwise complete.

        Args:
            tops: ``[R]``, the highest position the newest token of each may get.
            waiting: requests, while others enter. Whether drafting pays is asked for those of them that will have
                room, and for those within their prompts too: a round takes the next step as well.
        """
        if self._rests(slots):
            assert self._idle is not None
            return self._idle
        table = self.slots
        lowest = tops - caps - table.slack[slots]
        room = (samples > 0) & (tops + self.reserve <= self.max_model_len) & (lowest + 2 < table.max_len[slots])
        if room.any() and self.schedule is not None:
            blocks = self.cache.free_blocks // self.cache.blocks_for(int(tops.max()))  # as long as the longest now
            to_come = min(waiting, table.num_free, blocks) + int((samples == 0).sum())
            sampled = (table.length - table.slack - table.prompt_len)[slots[room]]
            fresh = int((sampled < FRESH_TOKENS).sum())
            wanted = self.schedule.drafts(int(room.sum()) + to_come, fresh + to_come)
            room = self._chosen(room, slots, wanted)
        propose = bool(room.any())
        if propose and self.reserve:
            for i in np.nonzero(room)[0].tolist():
                slot, most = int(slots[i]), int(tops[i]) + self.reserve
                room[i] = self.cache.can_grow(slot, most)
                if room[i]:
                    self.cache.grow(slot, most)
            propose = bool(room.any())
        self._offered[:] = False
        if propose:
            self._offered[slots[room]] = True
            self._turns += 1
            self._last_turn[slots[room]] = self._turns
        floating = self.slots.slack[slots] > 0
        rejects = self.slots.unseeded[slots] if self.judges_by_rejection else None
        turn = DraftTurn(caps=caps, total=total, floating=floating, room=room, propose=propose, rejects=rejects)
        self._idle = None if propose or total or floating.any() else turn
        return turn

    def _rests(self, slots: Array) -> bool:
        """True when the step is as the one before it, which drafted nothing, and it need not be asked again yet."""
        if self._idle is None or len(self._idle.caps) != len(slots):
            self._idle_steps = 0
            return False
        self._idle_steps = (self._idle_steps + 1) % ASKED_EACH
        return self._idle_steps != 0

    def _chosen(self, room: Array, slots: Array, count: int) -> Array:
        """``count`` of the requests that have room, those first whose last turn is longest ago."""
        if count <= 0:
            return np.zeros_like(room)
        if count >= int(room.sum()):
            return room
        order = np.argsort(np.where(room, self._last_turn[slots], np.iinfo(np.int64).max), kind="stable")
        chosen = np.zeros_like(room)
        chosen[order[:count]] = True
        return chosen

    def known(self, slots: Array, chances: Array) -> None:
        """The survival of newly made drafts, ``[R, n]`` of these slots, has become known to the host."""
        self._survival[slots] = 0.0
        self._survival[slots, : chances.shape[1]] = chances

    def observe(self, cost: VerifyCost) -> None:
        """What a step cost."""
        if self.schedule is not None:
            self.schedule.observe(cost)

    def entered(self, slot: int) -> None:
        """Another sequence took the slot: nothing is known of its drafts, so they count as certain."""
        self._idle = None
        self._offered[slot] = False
        self._survival[slot] = 1.0
        self._last_turn[slot] = 0
