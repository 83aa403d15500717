"""Where a step's time goes, with a clock that only the test moves; and what the planner learns of it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from toys.checkpoints import ToyLLM

from deepinfer_core import SamplingParams
from deepinfer_core.api import Event
from deepinfer_core.cpu.device import InlineStream, ThreadStream
from deepinfer_core.engine.step_cost import SAMPLES, StepCost
from deepinfer_core.engine.step_timing import StepTiming, TimedStream, Work


def timing(work: Work, **more: Any) -> StepTiming:
    """Plan 10 to 11, launch to 13, wait 20 to 24, commit to 27."""
    return StepTiming(
        number=1, tokens=4, prefill=0, requests=4, plan_start=10.0, plan_end=11.0, launch_end=13.0, work=work,
        wait_start=20.0, wait_end=24.0, commit_end=27.0, **more,
    )  # fmt: skip


def test_inline_work_is_the_devices_not_the_hosts() -> None:
    step = timing(Work(11.25, 12.75, inline=True))
    assert step.device_seconds == 1.5
    assert step.host_seconds == (13 - 10) - 1.5 + (27 - 24)


def test_work_in_another_thread_overlaps_the_host() -> None:
    step = timing(Work(12.0, 19.0))
    assert step.device_seconds == 7.0
    assert step.host_seconds == (13 - 10) + (27 - 24)


def test_a_device_behind_its_queue_ends_when_the_host_has_waited_for_it() -> None:
    step = timing(Work(11.5, 12.0), late=True)  # the closure only queued the work
    assert (step.device_end, step.device_seconds) == (24.0, 12.5)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_inline_stream_is_timed_and_known_to_be_inline() -> None:
    clock = Clock()
    stream = TimedStream(InlineStream(), clock)

    def work() -> str:
        clock.now += 3.0
        return "done"

    clock.now = 1.0
    assert stream.submit(work).wait() == "done"
    assert (stream.last.start, stream.last.end, stream.last.inline) == (1.0, 4.0, True)


def test_a_worker_thread_is_timed_and_not_inline() -> None:
    clock, go = Clock(), threading.Event()
    stream = TimedStream(ThreadStream(1), clock)

    def work() -> None:
        go.wait(30)
        clock.now = 5.0

    event = stream.submit(work)
    clock.now = 2.0
    go.set()
    event.wait()
    assert (stream.last.end, stream.last.inline) == (5.0, False)
    stream.close()


def test_a_closure_that_queues_work_is_not_inline() -> None:
    class Queued:
        """Calls the closure at once, and is done later."""

        def submit(self, fn: Any) -> Event[Any]:
            fn()
            return _Pending()

        def close(self) -> None:
            return None

    stream = TimedStream(Queued(), Clock())
    stream.submit(lambda: None)
    assert not stream.last.inline


class _Pending:
    def done(self) -> bool:
        return False

    def wait(self) -> Any:
        return None


def test_what_the_closure_raises_comes_out_of_the_event() -> None:
    stream = TimedStream(InlineStream(), Clock())

    def broken() -> None:
        raise ZeroDivisionError

    event = stream.submit(broken)
    with pytest.raises(ZeroDivisionError):
        event.wait()


# ---- in an engine


@pytest.mark.parametrize("ahead", [False, True])
def test_every_step_is_seen_once_and_in_order(toy_llm: ToyLLM, ahead: bool) -> None:
    llm = toy_llm("Count", scheduling__async_scheduling=ahead, scheduling__max_batch_tokens=8)
    seen: list[StepTiming] = []
    llm.engine.core.observer.watchers.append(seen.append)
    outputs = llm.generate([[1] * 11, [2] * 3], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert [step.number for step in seen] == sorted({step.number for step in seen})
    assert sum(step.prefill for step in seen) == 14
    assert sum(step.output_tokens for step in seen) == sum(len(o.outputs[0].token_ids) for o in outputs)
    for step in seen:
        assert step.plan_start <= step.plan_end <= step.launch_end <= step.wait_start <= step.wait_end
        assert step.wait_end <= step.commit_end
        assert step.host_seconds > 0
        assert step.device_seconds > 0
        assert step.seconds > 0
        assert step.work.inline is not ahead


def test_a_lost_step_does_not_mix_up_the_others(toy_llm: ToyLLM) -> None:
    llm = toy_llm("Count", scheduling__async_scheduling=True)
    seen: list[StepTiming] = []
    llm.engine.core.observer.watchers.append(seen.append)

    def scarce(batch: Any) -> None:
        if llm.engine.model.steps == 3:  # type: ignore[attr-defined]
            raise MemoryError("no room")

    llm.engine.model.before = scarce  # type: ignore[attr-defined]
    outputs = llm.generate([[1], [2]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert [len(o.outputs[0].token_ids) for o in outputs] == [8, 8]
    assert sum(step.output_tokens for step in seen) >= 16
    for step in seen:
        assert step.work.end >= step.work.start >= step.plan_end


def test_the_policys_step_cost_is_filled_while_the_engine_runs(toy_llm: ToyLLM) -> None:
    llm = toy_llm("Count")
    assert len(llm.engine.core.planner.step_cost.table()) == 0
    llm.generate([[1] * 20], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    table = llm.engine.core.planner.step_cost.table()
    assert table[:, 0].tolist() == [1, 20]
    assert (table[:, 1] > 0).all()


def test_step_cost_keeps_the_median_of_the_newest() -> None:
    cost = StepCost()
    for seconds in (100.0, 1.0, 5.0, 3.0):
        cost.record(5, seconds)
    assert cost.table().tolist() == [[5.0, 4.0]]
    for _ in range(SAMPLES):
        cost.record(8, 2.0)
    cost.record(9, 7.0)
    assert cost.table().tolist() == [[8.0, 2.0], [9.0, 7.0]]
