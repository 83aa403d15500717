"""What runs next: turns a policy's preferences into one step that respects every limit.

The planner owns blocks, budgets, chunking, preemption and progress. Three rules keep it live whatever a
policy answers: only rows about to produce a token may preempt others; the last running sequence is never
preempted; and when nothing at all can run, the newest arrivals make room for the oldest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np

from deepinfer_core.api import EventKind, Policy, SystemView, TokenSplit

from .block_hash import extend_keys
from .cached_prefixes import CachedPrefixes
from .kv_cache import KVCache, PrefixHit
from .observer import Observer
from .policy_guard import PolicyGuard
from .preemption import Preemption
from .request import Sequence
from .running_fields import RunningFields
from .slot_table import SlotTable
from .speculation_plan import DraftPlanner
from .step_cost import StepCost
from .step_plan import StepPlan
from .views import make_view
from .waiting import WaitingQueue

Array = np.ndarray[Any, Any]

SPARE_TENANTS = 256
"""Names of tenants that may be kept beside those of requests that are here."""

CALM_STEPS = 64
"""Steps without running out of memory after which a reduced token budget doubles."""


@attrs.define
class _Rows:
    """Prefill chunks gathered so far."""

    slots: list[int]
    counts: list[int]

    def add(self, slot: int, count: int) -> None:
        self.slots.append(slot)
        self.counts.append(count)


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
        observer: Observer | None = None,
    ) -> None:
        self.policy = policy
        self.observer = observer or Observer(slots, clock=clock)
        self.cache = cache
        self.slots = slots
        self.max_batch_tokens = max_batch_tokens
        self.chunked_prefill = chunked_prefill
        self.clock = clock
        self.waiting = WaitingQueue()
        self.prefixes = CachedPrefixes(self.waiting, self.lookup)
        self.fields = RunningFields(slots.slots)
        self.step_cost = StepCost()
        self.steps = 0
        self.budget = max_batch_tokens
        self._calm_steps = 0
        self.on_preempted: Callable[[Sequence], None] = lambda sequence: None
        self.drafting: DraftPlanner | None = None
        self.judges_by_rejection = False
        self.guard = PolicyGuard(policy, self.view, lambda: self.steps)
        self.preemption = Preemption(guard=self.guard, cache=cache, slots=slots, waiting=self.waiting, tell=self.tell)

    # ---- requests coming and going

    def keys(self, sequence: Sequence) -> list[bytes]:
        """Content keys of all blocks filled by the sequence's known tokens."""
        if not self.cache.prefix_cache:
            return sequence.keys
        known = sequence.tokens if sequence.slot < 0 else self.slots.tokens[sequence.slot]
        count = len(sequence.tokens) if sequence.slot < 0 else int(self.slots.committed[sequence.slot])
        return extend_keys(sequence.keys, sequence.request.root_key, known, count, self.cache.block_size)

    def enqueue(self, sequence: Sequence, *, held: bool = False) -> None:
        """A sequence arrives. A held one is not in the queue before :meth:`release`."""
        if len(self.waiting.tenants) > 2 * (len(self.waiting) + self.slots.slots) + SPARE_TENANTS:
            self.fields.renumber_tenants(self.waiting, self.slots)
        if not held:
            self.release(sequence)
        self.tell("queued", sequence, sequence.prompt_len)

    def release(self, sequence: Sequence) -> None:
        """A sequence may run from now on."""
        hit = self.lookup(sequence)
        self.waiting.add(sequence, hit.tokens)
        self.prefixes.watch(sequence, hit)

    def lookup(self, sequence: Sequence) -> PrefixHit:
        if not sequence.request.reads_prefix_cache:
            return PrefixHit(tokens=0, blocks=0, found={})
        return self.cache.lookup(self.keys(sequence), len(sequence.tokens))

    @property
    def needs_drain(self) -> bool:
        """A preemption waits for a step in flight."""
        return self.preemption.needs_drain

    def view(self) -> SystemView:
        return make_view(self)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that ended: waiting, or running with nothing in flight."""
        if sequence.slot >= 0:
            self.cache.release(sequence.slot)
            self.slots.give_back(sequence.slot)
        elif sequence in self.waiting:
            self._leave_queue(sequence)
        sequence.status = "finished"

    def _leave_queue(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.prefixes.forget(sequence)

    def stop_scheduling(self, sequence: Sequence) -> None:
        """A running sequence ended while a step of it is in flight; its slot and blocks wait for that step."""
        self.slots.finished[sequence.slot] = True
        self.slots.retire(sequence.slot)
        sequence.status = "finished"

    def tell(self, kind: EventKind, sequence: Sequence, tokens: int = 0) -> None:
        if kind == "preempted":
            self.prefixes.look_again(sequence)
            self.on_preempted(sequence)
        self.observer.tell(self.policy, kind, sequence, tokens)

    # ---- memory pressure

    def back_off(self) -> bool:
        """A step ran out of memory: plan half as much from now on. False when it was as small as it can be."""
        if self.budget <= 1 or not self.chunked_prefill:
            return False
        self.budget = max(1, self.budget // 2)
        self._calm_steps = 0
        return True

    def step_succeeded(self) -> None:
        """After a while without trouble the budget grows back."""
        if self.budget < self.max_batch_tokens:
            self._calm_steps += 1
            if self._calm_steps >= CALM_STEPS:
                self.budget, self._calm_steps = min(self.max_batch_tokens, 2 * self.budget), 0

    # ---- one step

    def plan(self, drafts: Mapping[int, Array] | None = None) -> StepPlan | None:
        """The next step, or None when nothing can run now (``needs_drain`` says whether commits would help).

        Args:
            drafts: slot -> tokens to verify together with its next token; those that do not fit are left out.
        """
        self.preemption.needs_drain = False
        self.steps += 1
        running = self.slots.running
        if self.cache.slides:
            self.cache.slide(running, self.slots.computed[running] - self.slots.slack[running])
        self.prefixes.refresh()
        remaining = self._remaining(running)
        split = self._split(remaining)
        decodes = self._decode_rows(running[remaining == 1], min(split.decode, self.budget))
        used = len(decodes)
        drafts = self._fitting_drafts(decodes, drafts or {}, min(split.decode, self.budget) - used)
        caps, total = np.array([len(drafts.get(slot, ())) for slot in decodes.tolist()], np.int64), 0
        if self.drafting is not None:
            caps, total = self.drafting.caps(decodes, min(split.decode, self.budget) - used)
        used += total + sum(map(len, drafts.values()))
        if self.slots.running is not running:  # some were preempted
            remaining = self._remaining(self.slots.running)
        rows = self._prefill_rows(remaining, min(split.prefill, self.budget - used))
        admitted = self._admit(min(split.prefill, self.budget - used) - sum(rows.counts), rows)
        if len(decodes) == 0 and not rows.slots:
            return self._unstick()
        return self._launch(decodes, drafts, rows, admitted, caps, total)

    def decoding_slots(self) -> Array:
        """Running slots that are one row short of their next token."""
        ready: Array = self.slots.running[self._remaining(self.slots.running) == 1]
        return ready

    def _split(self, remaining: Array) -> TokenSplit:
        """Asked only when decode rows and prompt rows compete for the step, those of a new request included."""
        whole = TokenSplit(self.max_batch_tokens, self.max_batch_tokens)
        decoding = remaining == 1
        if not decoding.any() or (decoding.all() and not (len(self.waiting) and self.slots.num_free)):
            return whole
        return self.guard.split(whole)

    def _remaining(self, slots: Array) -> Array:
        """Rows each slot could run now; 0 for those at their length limit."""
        table = self.slots
        remaining: Array = table.length[slots] - table.computed[slots]
        known = table.length[slots] < table.max_len[slots]
        if self.drafting is None:
            known &= table.slack[slots] == 0  # drafts in flight: without a verdict there is no next position
        return np.where(known, remaining, 0)

    def _decode_rows(self, ready: Array, budget: int) -> Array:
        """Of sequences one row short of their next token, the least recently scheduled if they do not all fit."""
        if len(ready) > budget:
            ready = ready[np.argsort(self.slots.last_turn[ready], kind="stable")[:budget]]
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
            if not self.preemption.make_room(slot, int(self.slots.length[slot])):
                keep[i] = False
        keep &= [self.slots.sequence[slot] is not None for slot in ready.tolist()]
        return ready[keep]

    def _fitting_drafts(self, decodes: Array, drafts: Mapping[int, Array], budget: int) -> dict[int, Array]:
        """Drafts of the scheduled slots, within the token budget and the free blocks; they preempt nobody."""
        fitting: dict[int, Array] = {}
        for slot in decodes.tolist() if drafts else ():
            tokens = drafts.get(slot)
            if tokens is None or budget <= 0:
                continue
            length = int(self.slots.length[slot])
            tokens = tokens[: min(budget, self.cache.most_tokens(slot) - length)]
            if len(tokens):
                self.cache.grow(slot, length + len(tokens))
                fitting[slot] = tokens
                budget -= len(tokens)
        return fitting

    def _prefill_rows(self, remaining: Array, budget: int) -> _Rows:
        """Next chunks of running sequences, in order of admission, as far as free blocks go."""
        rows = _Rows([], [])
        running = self.slots.running
        prefilling = remaining > 1
        if not prefilling.any():
            return rows
        for slot, rest in zip(running[prefilling].tolist(), remaining[prefilling].tolist(), strict=True):
            computed = int(self.slots.computed[slot])
            chunk = self._chunk(rest, min(budget, self.cache.most_tokens(slot) - computed))
            if chunk <= 0:
                continue
            self.cache.grow(slot, computed + chunk)
            rows.add(slot, chunk)
            budget -= chunk
        return rows

    def _chunk(self, rest: int, budget: int) -> int:
        """Rows of ``rest`` to run now. Without chunking all or none, unless they can never run at once:
        replayed outputs may make a request longer than a step, and a prompt longer than a window's blocks."""
        if rest <= budget:
            return rest
        splits = self.chunked_prefill or rest > min(self.max_batch_tokens, self.cache.window_capacity)
        return max(budget, 0) if splits else 0

    # ---- admission

    def _admit(self, budget: int, rows: _Rows) -> list[Sequence]:
        admitted: list[Sequence] = []
        if not len(self.waiting) or budget <= 0 or not self.slots.num_free:
            self._note_full()
            return admitted
        for sequence in self.guard.candidates(self.waiting, self.slots.num_free, self.cache.free_blocks):
            if budget <= 0 or not self.slots.num_free:
                self._note_full()
                break
            if self._sibling_is_prefilling(sequence):
                self.observer.waits(sequence, "its first completion's prompt, to share it")
                continue
            known = len(sequence.tokens)
            hit = self.lookup(sequence)
            chunk = self._chunk(known - hit.tokens, min(budget, self.cache.window_room(hit)))
            if chunk == 0:
                self.observer.waits(sequence, "a step with room for its whole prompt")
                self.waiting.set_cached(sequence, hit.tokens)
                break
            if not self.cache.room_for(hit, chunk, min(known + 1, sequence.request.max_len)):
                self.observer.waits(sequence, "free cache blocks")
                self.waiting.set_cached(sequence, hit.tokens)
                break
            self._leave_queue(sequence)
            slot = self.slots.take(sequence, hit.tokens)
            self.cache.start(slot, hit)
            self.cache.grow(slot, hit.tokens + chunk)
            self._enter(sequence, hit)
            rows.add(slot, chunk)
            budget -= chunk
            admitted.append(sequence)
        return admitted

    def _enter(self, sequence: Sequence, hit: PrefixHit) -> None:
        self.slots.published[sequence.slot] = hit.blocks
        self.fields.set(sequence, cached=hit.tokens, tenant=self.waiting.tenant_index(sequence.request.tenant))
        metrics = sequence.request.metrics
        resumed = metrics.first_scheduled is not None and len(sequence.tokens) > sequence.prompt_len
        if metrics.first_scheduled is None:
            metrics.first_scheduled = self.clock()
        if not resumed:
            metrics.cached_tokens += hit.tokens
        self.tell("resumed" if resumed else "admitted", sequence, len(sequence.tokens))

    def _sibling_is_prefilling(self, sequence: Sequence) -> bool:
        """Completions after the first wait for its prompt blocks, which the prefix cache then shares."""
        if sequence.child == 0 or not self.cache.prefix_cache or not sequence.request.reads_prefix_cache:
            return False
        first = sequence.request.sequences[0]
        if first.status == "waiting":
            return True
        return first.status == "running" and bool(self.slots.committed[first.slot] <= first.prompt_len)

    def _note_full(self) -> None:
        if len(self.waiting):
            lacks = "a step with tokens to spare" if self.slots.num_free else "a free slot"
            self.observer.waits(self.waiting.at(0), lacks)

    def _unstick(self) -> StepPlan | None:
        """Nothing fits, so the oldest ready sequence gets the room of the newest ones."""
        running = self.slots.running
        ready: list[int] = running[self._remaining(running) > 0].tolist()
        if not ready or self.needs_drain:
            return None

        def wanted(slot: int) -> int:
            rest = int(self._remaining(np.array([slot]))[0])
            return int(self.slots.computed[slot]) + min(rest, self.budget)

        slot = self.preemption.free_for_oldest(ready, wanted)
        if slot is None:
            return None
        computed = int(self.slots.computed[slot])
        most = min(self.budget, self.cache.most_tokens(slot) - computed)
        chunk = self._chunk(int(self._remaining(np.array([slot]))[0]), most)
        if chunk <= 0:
            return None
        self.cache.grow(slot, computed + chunk)
        none = np.zeros(0, np.int64)
        return self._launch(none, {}, _Rows([slot], [chunk]), [], none, 0)

    # ---- the plan itself

    def _launch(
        self, decodes: Array, drafts: dict[int, Array], rows: _Rows, admitted: list[Sequence], caps: Array, total: int
    ) -> StepPlan:
        """Fix the step and count it as launched. Decode rows come first, with at most ``caps`` drafts each."""
        table = self.slots
        slots = np.concatenate([decodes, np.array(rows.slots, np.int64)])
        counts = np.concatenate([np.ones(len(decodes), np.int64), np.array(rows.counts, np.int64)])
        starts = table.computed[slots]
        samples = (starts + counts == table.length[slots]).astype(np.int64)
        caps = np.concatenate([caps, np.zeros(len(rows.slots), np.int64)])
        counts += caps
        samples += caps
        turn = None
        if self.drafting is not None:
            for sequence in admitted:
                self.drafting.entered(sequence.slot)
            waiting = len(self.waiting) if admitted else 0
            turn = self.drafting.turn(slots, starts + counts, samples, caps, total, waiting)
        plan = StepPlan(
            number=self.steps,
            slots=slots,
            starts=starts,
            counts=counts,
            samples=samples,
            admitted=admitted,
            drafts=drafts,
            rejects=table.unseeded[slots] if self.judges_by_rejection else None,
            turn=turn,
        )
        table.computed[slots] += counts
        table.length[slots] += samples
        table.slack[slots] += caps
        table.in_flight[slots] += 1
        table.scheduled(slots, plan.number)
        return plan
