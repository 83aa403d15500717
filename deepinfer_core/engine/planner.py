"""What runs next: turns a policy's preferences into one step that respects every limit.

The planner owns blocks, budgets, chunking, preemption and progress. Three rules keep it live whatever a
policy answers: only rows about to produce a token may preempt others; the last running sequence is never
preempted; and when nothing at all can run, the newest arrivals make room for the oldest.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import structlog

from deepinfer_core.api import EventKind, Policy, SchedulingEvent, TokenSplit

from .block_hash import extend_keys
from .kv_cache import KVCache, PrefixHit
from .request import Sequence
from .slot_table import SlotTable
from .step_cost import StepCost
from .views import make_view, request_view
from .waiting import WaitingQueue

log = structlog.get_logger("deepinfer.planner")

Array = np.ndarray[Any, Any]


@attrs.define(kw_only=True)
class StepPlan:
    """Rows of one step. R requests own ``counts`` rows each, starting at position ``starts``.

    ``produces`` marks requests whose last row yields a token. Decode rows come first. ``admitted`` are the
    sequences that took a slot in this step, so that the runner writes their device state before it runs.
    """

    number: int
    slots: Array
    starts: Array
    counts: Array
    produces: Array
    admitted: list[Sequence]

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())


class Planner:
    """Plans steps over the waiting queue, the slot table and the cache."""

    def __init__(
        self,
        *,
        policy: Policy,
        cache: KVCache,
        slots: SlotTable,
        max_batch_tokens: int,
        chunked_prefill: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy
        self.cache = cache
        self.slots = slots
        self.max_batch_tokens = max_batch_tokens
        self.chunked_prefill = chunked_prefill
        self.clock = clock
        self.waiting = WaitingQueue()
        self.step_cost = StepCost()
        self.steps = 0
        self.preemptions = 0
        self.needs_drain = False
        self._running: Array = np.zeros(0, np.int64)
        self._order: list[int] = []
        self._order_key: tuple[int, int, int] | None = None

    # ---- requests coming and going

    def keys(self, sequence: Sequence) -> list[bytes]:
        """Content keys of all blocks filled by the sequence's known tokens."""
        if not self.cache.prefix_cache:
            return sequence.keys
        known = sequence.tokens if sequence.slot < 0 else self.slots.tokens[sequence.slot]
        count = len(sequence.tokens) if sequence.slot < 0 else int(self.slots.committed[sequence.slot])
        return extend_keys(sequence.keys, sequence.request.root_key, known, count, self.cache.block_size)

    def enqueue(self, sequence: Sequence) -> None:
        hit = self.lookup(sequence)
        self.waiting.add(sequence, hit.tokens)
        self.tell("queued", sequence, sequence.prompt_len)

    def lookup(self, sequence: Sequence) -> PrefixHit:
        if not sequence.request.reads_prefix_cache:
            return PrefixHit(tokens=0, blocks=0, found={})
        return self.cache.lookup(self.keys(sequence), len(sequence.tokens))

    def running(self) -> Array:
        """Slots of running sequences, in order of admission."""
        return self._running

    def view(self) -> Any:
        return make_view(self)

    def admit_request(self, sequence: Sequence) -> Any:
        return self.policy.admit(request_view(sequence.request), self.view())

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that ended: waiting, or running with nothing in flight."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
        else:
            self._leave_slot(sequence)
        sequence.status = "finished"

    def stop_scheduling(self, sequence: Sequence) -> None:
        """A running sequence ended while a step of it is in flight; its slot and blocks wait for that step."""
        self.slots.finished[sequence.slot] = True
        self._running = self._running[self._running != sequence.slot]
        sequence.status = "finished"

    def _leave_slot(self, sequence: Sequence) -> None:
        slot = sequence.slot
        self._running = self._running[self._running != slot]
        self.cache.release(slot)
        self.slots.give_back(slot)

    def tell(self, kind: EventKind, sequence: Sequence, tokens: int = 0) -> None:
        request = sequence.request
        event = SchedulingEvent(
            kind=kind, request_id=request.request_id, time=self.clock(), tokens=tokens, tenant=request.tenant
        )
        try:
            self.policy.on_event(event)
        except Exception:
            log.exception("scheduling policy raised in on_event", kind=kind, request_id=request.request_id)

    # ---- one step

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run now (``needs_drain`` says whether commits would help)."""
        self.needs_drain = False
        self.steps += 1
        self.cache.slide(self._running, self.slots.computed[self._running])
        rows: list[tuple[Array, Array]] = []  # (slots, row counts)
        split = self._split()
        budget = self.max_batch_tokens

        decodes = self._decode_rows(min(split.decode, budget))
        rows.append((decodes, np.ones(len(decodes), np.int64)))
        budget -= len(decodes)

        prefill_budget = min(split.prefill, budget)
        prefills, counts = self._prefill_rows(prefill_budget)
        prefill_budget -= sum(counts)
        admitted = self._admit(prefill_budget, prefills, counts)
        rows.append((np.array(prefills, np.int64), np.array(counts, np.int64)))

        slots = np.concatenate([s for s, _ in rows])
        if len(slots) == 0:
            return self._unstick()
        plan = self._finish_plan(slots, np.concatenate([c for _, c in rows]), admitted)
        self._mark_launched(plan)
        return plan

    def _split(self) -> TokenSplit:
        whole = TokenSplit(self.max_batch_tokens, self.max_batch_tokens)
        decoding = self._remaining(self._running) == 1
        if not decoding.any() or (decoding.all() and not len(self.waiting)):
            return whole
        split = self.policy.split(self.view())
        if split.decode <= 0 and split.prefill <= 0:
            return whole
        return TokenSplit(max(split.decode, 0), max(split.prefill, 0))

    def _remaining(self, slots: Array) -> Array:
        """Rows each slot could run now; 0 for those at their length limit."""
        table = self.slots
        remaining: Array = table.length[slots] - table.computed[slots]
        return np.where(table.length[slots] < table.max_len[slots], remaining, 0)

    def _decode_rows(self, budget: int) -> Array:
        """Sequences one row short of their next token, least recently scheduled first if they do not all fit."""
        running = self._running
        ready: Array = running[self._remaining(running) == 1]
        if len(ready) > budget:
            ready = ready[np.argsort(self.slots.last_step[ready], kind="stable")[:budget]]
        if len(ready) == 0:
            return ready
        lacking = self.cache.lacking(ready, self.slots.length[ready])
        if not lacking.any():
            return ready
        keep = np.ones(len(ready), bool)
        for i in np.nonzero(lacking)[0]:
            slot = int(ready[i])
            if self.slots.sequence[slot] is None:
                continue  # was preempted for a sequence before it
            if not self._grow_or_preempt(slot, int(self.slots.length[slot])):
                keep[i] = False
        still_running = np.isin(ready, self._running)
        return ready[keep & still_running]

    def _grow_or_preempt(self, slot: int, tokens: int) -> bool:
        while not self.cache.can_grow(slot, tokens):
            if not self._preempt_one(slot, self.cache.missing_blocks(slot, tokens)):
                return False
        self.cache.grow(slot, tokens)
        return True

    def _prefill_rows(self, budget: int) -> tuple[list[int], list[int]]:
        """Next chunks of running sequences, in order of admission, as far as free blocks go."""
        slots: list[int] = []
        counts: list[int] = []
        running = self._running
        remaining = self._remaining(running)
        for slot, rest in zip(running[remaining > 1].tolist(), remaining[remaining > 1].tolist(), strict=True):
            computed = int(self.slots.computed[slot])
            chunk = self._chunk(rest, min(budget, self.cache.most_tokens(slot) - computed))
            if chunk <= 0:
                continue
            self.cache.grow(slot, computed + chunk)
            slots.append(slot)
            counts.append(chunk)
            budget -= chunk
        return slots, counts

    def _chunk(self, rest: int, budget: int) -> int:
        if rest <= budget:
            return rest
        return max(budget, 0) if self.chunked_prefill else 0

    # ---- admission

    def _admit(self, budget: int, prefills: list[int], counts: list[int]) -> list[Sequence]:
        admitted: list[Sequence] = []
        if not len(self.waiting) or budget <= 0 or not self.slots.num_free:
            self._note_waiting("no free slot" if not self.slots.num_free else "token budget spent")
            return admitted
        for sequence in self._candidates():
            if budget <= 0 or not self.slots.num_free:
                break
            if self._sibling_is_prefilling(sequence):
                sequence.waiting_for = "its first completion's prompt, to share it"
                continue
            known = len(sequence.tokens)
            hit = self.lookup(sequence)
            chunk = self._chunk(known - hit.tokens, budget)
            if chunk == 0:
                sequence.waiting_for = "a step with room for its whole prompt"
                break
            if not self.cache.room_for(hit, chunk, min(known + 1, sequence.request.max_len)):
                sequence.waiting_for = "free cache blocks"
                break
            self.waiting.remove(sequence)
            slot = self.slots.take(sequence, hit.tokens)
            self.cache.start(slot, hit)
            self.cache.grow(slot, hit.tokens + chunk)
            self._enter(sequence, hit)
            prefills.append(slot)
            counts.append(chunk)
            budget -= chunk
            admitted.append(sequence)
        return admitted

    def _enter(self, sequence: Sequence, hit: PrefixHit) -> None:
        self._running = np.append(self._running, sequence.slot)
        self.slots.published[sequence.slot] = hit.blocks
        metrics = sequence.request.metrics
        resumed = metrics.first_scheduled is not None and len(sequence.tokens) > sequence.prompt_len
        if metrics.first_scheduled is None:
            metrics.first_scheduled = self.clock()
        if not resumed:
            metrics.cached_tokens += hit.tokens
        self.tell("resumed" if resumed else "admitted", sequence, len(sequence.tokens))

    def _candidates(self) -> list[Sequence]:
        """The policy's preference, then everything else in arrival order."""
        k = self.slots.num_free
        key = (self.waiting.version, k, self.cache.free_blocks)
        if key != self._order_key:
            self._order = self._ask_order(k)
            self._order_key = key
        taken = set(self._order)
        rest = (i for i in range(len(self.waiting)) if i not in taken)
        return [self.waiting.at(i) for i in itertools.chain(self._order, itertools.islice(rest, k))]

    def _ask_order(self, k: int) -> list[int]:
        answer: list[int] = []
        seen: set[int] = set()
        for index in self.policy.order(self.view(), k):
            if 0 <= index < len(self.waiting) and index not in seen:
                seen.add(index)
                answer.append(int(index))
        return answer[:k]

    def _sibling_is_prefilling(self, sequence: Sequence) -> bool:
        """Completions after the first wait for its prompt blocks, which the prefix cache then shares."""
        if sequence.child == 0 or not self.cache.prefix_cache or not sequence.request.reads_prefix_cache:
            return False
        first = sequence.request.sequences[0]
        if first.status == "waiting":
            return True
        return first.status == "running" and bool(self.slots.committed[first.slot] <= first.prompt_len)

    def _note_waiting(self, reason: str) -> None:
        if len(self.waiting):
            self.waiting.at(0).waiting_for = reason

    # ---- preemption

    def _preempt_one(self, for_slot: int, need_blocks: int) -> bool:
        """Preempt one sequence other than ``for_slot``, or say that it cannot be done now."""
        if len(self._running) <= 1:
            return False
        if self.slots.in_flight[self._running].any():
            self.needs_drain = True
            return False
        for index in self._victims(need_blocks):
            slot = int(self._running[index])
            if slot != for_slot:
                self._preempt(slot)
                return True
        return False

    def _victims(self, need_blocks: int) -> list[int]:
        count = len(self._running)
        asked = [i for i in self.policy.victims(self.view(), need_blocks) if 0 <= i < count]
        newest_first = sorted(range(count), key=lambda i: -self._sequence(int(self._running[i])).number)
        return asked + newest_first

    def _sequence(self, slot: int) -> Sequence:
        sequence = self.slots.sequence[slot]
        assert sequence is not None
        return sequence

    def _preempt(self, slot: int) -> None:
        sequence = self._sequence(slot)
        self._leave_slot(sequence)
        sequence.status = "waiting"
        sequence.waiting_for = "free cache blocks, after it was preempted"
        sequence.request.metrics.preemptions += 1
        self.preemptions += 1
        self.waiting.add(sequence)
        self.tell("preempted", sequence, len(sequence.tokens))

    def _unstick(self) -> StepPlan | None:
        """Nothing fits. Preempt the newest arrivals until the oldest can go on."""
        ready = [s for s in self._running.tolist() if self._remaining(np.array([s]))[0] > 0]
        if not ready or self.needs_drain:
            return None
        if self.slots.in_flight[self._running].any():
            self.needs_drain = True
            return None
        oldest = min(ready, key=lambda slot: self._sequence(slot).number)
        computed = int(self.slots.computed[oldest])
        rest = int(self._remaining(np.array([oldest]))[0])
        for slot in sorted(self._running.tolist(), key=lambda s: -self._sequence(s).number):
            if self.cache.can_grow(oldest, computed + min(rest, self.max_batch_tokens)):
                break
            if slot != oldest:
                self._preempt(slot)
        chunk = self._chunk(rest, min(self.max_batch_tokens, self.cache.most_tokens(oldest) - computed))
        if chunk <= 0:
            return None
        self.cache.grow(oldest, computed + chunk)
        plan = self._finish_plan(np.array([oldest], np.int64), np.array([chunk], np.int64), [])
        self._mark_launched(plan)
        return plan

    # ---- the plan itself

    def _finish_plan(self, slots: Array, counts: Array, admitted: list[Sequence]) -> StepPlan:
        starts = self.slots.computed[slots]
        return StepPlan(
            number=self.steps,
            slots=slots,
            starts=starts,
            counts=counts,
            produces=starts + counts == self.slots.length[slots],
            admitted=admitted,
        )

    def _mark_launched(self, plan: StepPlan) -> None:
        table = self.slots
        table.computed[plan.slots] += plan.counts
        table.length[plan.slots[plan.produces]] += 1
        table.in_flight[plan.slots] += 1
        table.last_step[plan.slots] = plan.number
