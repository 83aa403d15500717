"""WaitingQueue against a sorted list."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deepinfer_core import SamplingParams
from deepinfer_core.engine.outputs import RequestMetrics
from deepinfer_core.engine.request import Request, Sequence
from deepinfer_core.engine.waiting import WaitingQueue


def make_sequence(
    number: int, *, prompt: int, output: int, tenant: str, priority: int, deadline: float | None
) -> Sequence:
    request = Request(
        request_id=f"r{number}",
        prompt=None,
        prompt_token_ids=[0] * prompt,
        params=SamplingParams(),
        seed=0,
        root_key=b"",
        max_len=prompt + 100,
        eos_token_ids=(),
        stop_token_ids=(),
        tenant=tenant,
        priority=priority,
        deadline=deadline,
        metrics=RequestMetrics(arrival=float(number)),
    )
    return Sequence(request=request, child=0, number=number, tokens=np.zeros(prompt + output, np.int32))


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.waiting: dict[int, tuple[Sequence, int]] = {}
        self.away: dict[int, Sequence] = {}
        self.tenants: list[str] = []
        self.versions: set[int] = {self.queue.version}
        self.next_number = 0

    def changed(self) -> None:
        assert self.queue.version not in self.versions
        self.versions.add(self.queue.version)

    @rule(
        count=st.integers(1, 40),
        tenant=st.sampled_from(["", "a", "b"]),
        priority=st.integers(-3, 3),
        deadline=st.none() | st.floats(0, 100),
    )
    def arrive(self, count: int, tenant: str, priority: int, deadline: float | None) -> None:
        for _ in range(count):
            self.next_number += 3
            sequence = make_sequence(
                self.next_number,
                prompt=self.next_number % 7 + 1,
                output=0,
                tenant=tenant,
                priority=priority,
                deadline=deadline,
            )
            self.put(sequence, self.next_number % 5)

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def return_preempted(self, data: st.DataObject) -> None:
        self.put(self.away.pop(data.draw(st.sampled_from(sorted(self.away)))), 0)

    def put(self, sequence: Sequence, cached: int) -> None:
        self.queue.add(sequence, cached)
        self.waiting[sequence.number] = (sequence, cached)
        if sequence.request.tenant not in self.tenants:
            self.tenants.append(sequence.request.tenant)
        self.changed()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), count=st.integers(1, 30))
    def leave(self, data: st.DataObject, count: int) -> None:
        for _ in range(min(count, len(self.waiting))):
            number = data.draw(st.sampled_from(sorted(self.waiting)))
            sequence, _ = self.waiting.pop(number)
            self.queue.remove(sequence)
            self.away[number] = sequence
            self.changed()

    @invariant()
    def is_a_sorted_list(self) -> None:
        order = [self.waiting[number] for number in sorted(self.waiting)]
        assert len(self.queue) == len(order)
        assert list(self.queue) == [sequence for sequence, _ in order]
        assert list(self.queue.ids()) == [sequence.request.request_id for sequence, _ in order]
        assert [self.queue.at(i) for i in range(len(order))] == [sequence for sequence, _ in order]
        assert self.queue.tenants == self.tenants

    @invariant()
    def columns_belong_to_their_sequences(self) -> None:
        columns = self.queue.columns()
        for i, number in enumerate(sorted(self.waiting)):
            sequence, cached = self.waiting[number]
            row: dict[str, Any] = {name: values[i] for name, values in columns.items()}
            assert row["arrival"] == number
            assert row["prompt"] == sequence.prompt_len
            assert row["cached"] == cached
            assert row["output"] == len(sequence.tokens) - sequence.prompt_len
            assert row["max_tokens"] == 100
            assert row["priority"] == sequence.request.priority
            assert self.tenants[int(row["tenant"])] == sequence.request.tenant
            assert row["deadline"] == (np.inf if sequence.request.deadline is None else sequence.request.deadline)
            assert row["ttft"] == row["tpot"] == np.inf


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=25, stateful_step_count=20)
