"""Planner under random policies, arrivals and ends: every plan keeps every limit, and all work gets done."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_kv_cache_machine import spec
from toys.checkpoints import ToyLLM

from deepinfer_core import SamplingParams
from deepinfer_core.api import Admit, RequestView, SchedulingEvent, SystemView, TokenSplit
from deepinfer_core.engine.block_hash import domain_key
from deepinfer_core.engine.kv_cache import KVCache
from deepinfer_core.engine.outputs import RequestMetrics
from deepinfer_core.engine.planner import SPARE_TENANTS, Planner, StepPlan
from deepinfer_core.engine.request import Request, Sequence
from deepinfer_core.engine.slot_table import SlotTable

BLOCK, LIMIT = 4, 64
GROUPS: list[dict[str, int | None]] = [{"full": None}, {"near": 6}, {"full": None, "near": 5}]


class RandomPolicy:
    """Answers anything, and checks what it is shown and told."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.events: dict[str, list[str]] = {}

    def admit(self, request: RequestView, view: SystemView) -> Admit:
        return Admit(True)

    def order(self, view: SystemView, k: int) -> SequenceOf[int]:
        count = len(view.waiting.ids)
        assert view.waiting.arrival.tolist() == sorted(view.waiting.arrival.tolist())
        return [self.random.randrange(-1, count + 2) for _ in range(self.random.randrange(k + 2))]

    def split(self, view: SystemView) -> TokenSplit:
        return TokenSplit(self.random.randrange(-1, 9), self.random.randrange(-1, 9))

    def victims(self, view: SystemView, need_blocks: int) -> SequenceOf[int]:
        count = len(view.running.ids)
        assert need_blocks >= 1
        assert count >= 2
        assert view.running.arrival.tolist() == sorted(view.running.arrival.tolist())
        return [self.random.randrange(-1, count + 1) for _ in range(self.random.randrange(4))]

    def on_event(self, event: SchedulingEvent) -> None:
        self.events.setdefault(event.request_id, []).append(event.kind)


class PlannerMachine(RuleBasedStateMachine):
    """The planner with a committer of a few lines, one step ahead or not."""

    @initialize(
        groups=st.sampled_from(GROUPS),
        num_blocks=st.integers(7, 9),
        budget=st.integers(1, 12),
        slots=st.integers(1, 5),
        ahead=st.integers(0, 1),
        chunked=st.booleans(),
        prefix_cache=st.booleans(),
        seed=st.integers(0, 1000),
    )
    def begin(
        self,
        groups: dict[str, int | None],
        num_blocks: int,
        budget: int,
        slots: int,
        ahead: int,
        chunked: bool,
        prefix_cache: bool,
        seed: int,
    ) -> None:
        self.windows, self.ahead, self.chunked = groups, ahead, chunked
        self.policy = RandomPolicy(seed)
        self.random = random.Random(seed)
        self.slots = SlotTable(slots)
        self.cache = KVCache(
            [spec(n, w) for n, w in groups.items()],
            dict.fromkeys(groups, num_blocks),
            block_size=BLOCK,
            slots=slots,
            max_model_len=LIMIT,
            prefix_cache=prefix_cache,
        )
        self.planner = Planner(
            policy=self.policy, cache=self.cache, slots=self.slots, max_batch_tokens=budget, chunked_prefill=chunked
        )
        self.live: dict[int, Sequence] = {}
        self.launched: deque[StepPlan] = deque()
        self.number = 0

    @rule(prompt=st.integers(1, 20), output=st.integers(1, 15), shared=st.integers(0, 20), count=st.integers(1, 3))
    def arrive(self, prompt: int, output: int, shared: int, count: int) -> None:
        for _ in range(count):
            self.number += 1
            if not self.chunked:
                prompt = min(prompt, self.planner.max_batch_tokens)
            ids = [*range(min(shared, prompt)), *[self.number + 100] * (prompt - min(shared, prompt))]
            request = Request(
                request_id=str(self.number),
                prompt=None,
                prompt_token_ids=ids,
                params=SamplingParams(),
                seed=0,
                root_key=domain_key(""),
                max_len=min(prompt + output, self.cache.capacity, LIMIT),
                eos_token_ids=(),
                stop_token_ids=(),
                metrics=RequestMetrics(arrival=float(self.number)),
            )
            sequence = Sequence(request=request, child=0, number=self.number, tokens=np.array(ids, np.int32))
            request.sequences.append(sequence)
            self.planner.enqueue(sequence)
            self.live[self.number] = sequence

    @rule()
    def step(self) -> None:
        if self.planner.needs_drain and self.launched:
            self.commit()
            return
        before = self.slots.computed.copy()
        plan = self.planner.plan()
        if plan is not None:
            self.check(plan, before)
            self.launched.append(plan)
        if len(self.launched) > (self.ahead if plan is not None else 0):
            self.commit()

    def check(self, plan: StepPlan, before: np.ndarray[Any, Any]) -> None:
        table = self.slots
        assert 1 <= plan.num_tokens <= self.planner.max_batch_tokens
        assert len(set(plan.slots.tolist())) == len(plan.slots)
        assert (plan.counts >= 1).all()
        admitted = {sequence.slot for sequence in plan.admitted}
        for slot, start, count, samples in zip(plan.slots, plan.starts, plan.counts, plan.samples, strict=True):
            assert table.sequence[slot] is not None
            if slot not in admitted:
                assert start == before[slot]
            assert table.computed[slot] == start + count
            assert samples == (start + count == table.length[slot] - samples)
            assert table.length[slot] <= table.max_len[slot]
            for name, group in self.cache.groups.items():
                window = self.windows[name]
                first = 0 if window is None else max(0, start - window + 1)
                assert group.table[slot, first // BLOCK : -(-(start + count) // BLOCK)].all()
        remaining = table.length[plan.slots] - plan.samples - plan.starts
        decodes = (remaining == 1) & ~np.isin(plan.slots, list(admitted))
        assert decodes.tolist() == sorted(decodes.tolist(), reverse=True)

    def commit(self) -> None:
        plan, table = self.launched.popleft(), self.slots
        table.in_flight[plan.slots] -= 1
        for slot, end, samples in zip(
            plan.slots.tolist(), (plan.starts + plan.counts).tolist(), plan.samples, strict=True
        ):
            sequence = table.sequence[slot]
            assert sequence is not None
            if sequence.status == "finished":
                if not table.in_flight[slot]:
                    self.planner.remove(sequence)
                continue
            if samples:
                table.tokens[slot, end] = 200 + self.random.randrange(2)
                table.committed[slot] = end + 1
            blocks = end // BLOCK
            if self.cache.prefix_cache and blocks > table.published[slot]:
                self.cache.publish(slot, self.planner.keys(sequence), int(table.published[slot]), blocks)
                table.published[slot] = blocks
            if samples and (end + 1 >= table.max_len[slot] or self.random.random() < 0.05):
                self.finish(sequence)

    def finish(self, sequence: Sequence) -> None:
        if sequence.slot >= 0 and self.slots.in_flight[sequence.slot]:
            self.planner.stop_scheduling(sequence)
        else:
            self.planner.remove(sequence)
        del self.live[sequence.number]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.finish(self.live[data.draw(st.sampled_from(sorted(self.live)))])

    @invariant()
    def running_and_waiting_are_the_live_ones(self) -> None:
        if not hasattr(self, "live"):
            return
        running = [s for s in self.slots.sequence if s is not None and s.status == "running"]
        assert sorted(s.number for s in [*running, *self.planner.waiting]) == sorted(self.live)
        assert sorted(self.slots.running.tolist()) == sorted(s.slot for s in running)

    @invariant()
    def blocks_are_the_tables(self) -> None:
        if not hasattr(self, "live"):
            return
        for group in self.cache.groups.values():
            counts = np.bincount(group.table.ravel(), minlength=group.pool.num_blocks)
            assert counts[1:].tolist() == group.pool._owners[1:]

    def teardown(self) -> None:
        """All of it ends, in no more steps than recomputing everything for every token would take."""
        if not hasattr(self, "live"):
            return
        limit = 50 + 30 * sum(s.request.max_len for s in self.live.values())
        while self.live or self.launched:
            self.step()
            limit -= 1
            assert limit > 0, "no progress"
        for group in self.cache.groups.values():
            assert group.pool.num_free == group.pool.num_usable
        assert self.slots.num_free == self.slots.slots
        for kinds in self.policy.events.values():
            assert kinds[0] == "queued"
            assert kinds.count("preempted") >= kinds.count("resumed")


def test_tenants_that_left_are_forgotten_and_the_others_keep_their_requests(toy_llm: ToyLLM) -> None:
    """Thousands of tenants, a few at a time: the table stays small, and every row of a view names its own tenant."""
    llm = toy_llm("Count", scheduling__max_running=4)
    core, most = llm.engine.core, 0
    for number in range(1500):
        fields = {"prompt_token_ids": [number % 60], "tenant": f"tenant {number}"}
        params = SamplingParams(temperature=0, max_tokens=1 + number % 7)
        core.add([llm.engine.intake.request(str(number), fields, params, now=float(number), stream=False)])
        if len(core.requests) > 12:
            core.step()
        view = core.planner.view()
        for arrays in (view.waiting, view.running):
            named = [view.tenants[index] for index in arrays.tenant.tolist()]
            assert named == [f"tenant {request_id}" for request_id in arrays.ids]
        most = max(most, len(view.tenants))
    assert most <= SPARE_TENANTS + 2 * (20 + 4) + 1
    core.abort(list(core.requests))
    core.drain()


TestPlannerMachine = PlannerMachine.TestCase
TestPlannerMachine.settings = settings(max_examples=60, stateful_step_count=40)
