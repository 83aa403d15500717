"""What a request's own record says of it: times, chunks, preemptions, and why it waited."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from metrics_support import PATHS
from toys.checkpoints import ToyLLM

from deepinfer_core import LLM, RequestMetrics, RequestOutput, SamplingParams
from deepinfer_core.engine.request import Request
from deepinfer_core.engine.timeline import MAX_EVENTS, TimelineEvent, note


def greedy(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)


def events(output: RequestOutput, *kinds: str, child: int = 0) -> list[TimelineEvent]:
    found = [event for event in output.metrics.timeline if event.detail["child"] == child]
    return [event for event in found if event.event in kinds] if kinds else found


def names(output: RequestOutput, child: int = 0) -> list[str]:
    return [event.event for event in events(output, child=child)]


def crowded(toy_llm: ToyLLM, **settings: Any) -> list[RequestOutput]:
    """Four requests in a pool that holds two or three at full length."""
    llm = toy_llm("PrefixHash", **{"kv_cache__num_blocks": 11, "kv_cache__prefix_cache": False, **settings})
    return llm.generate([[i, *range(6)] for i in range(4)], greedy(20))


# ---- the timeline


def test_a_quiet_request(toy_llm: ToyLLM) -> None:
    output = toy_llm("Count").generate([[1, 2, 3]], greedy(4))[0]
    assert names(output) == ["queued", "admitted", "chunk", "first_token", "finished"]
    assert [dict(event.detail) for event in output.metrics.timeline] == [
        {"child": 0, "prompt": 3},
        {"child": 0, "tokens": 3, "cached": 0},
        {"child": 0, "start": 0, "tokens": 3},
        {"child": 0},
        {"child": 0, "reason": "length", "tokens": 4},
    ]


def test_events_unpack(toy_llm: ToyLLM) -> None:
    output = toy_llm("Count").generate([[1]], greedy(1))[0]
    time, event, detail = output.metrics.timeline[-1]
    assert (event, detail["tokens"]) == ("finished", 1)
    assert time <= (output.metrics.finished or 0)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("pool", [11, 65])
def test_times_never_go_back(toy_llm: ToyLLM, ahead: bool, pool: int) -> None:
    outputs = crowded(toy_llm, kv_cache__num_blocks=pool, scheduling__async_scheduling=ahead)
    for output in outputs:
        times = [output.metrics.arrival, *(event.time for event in output.metrics.timeline)]
        assert all(before <= after for before, after in pairwise(times))
        first, last = output.metrics.first_token, output.metrics.finished
        assert first is not None
        assert last is not None
        assert output.metrics.arrival <= first <= times[-1] <= last


@pytest.mark.parametrize("budget", [4, 7, 64])
def test_chunks_cover_what_the_cache_did_not_hold(toy_llm: ToyLLM, budget: int) -> None:
    llm = toy_llm("PrefixHash", scheduling__max_batch_tokens=budget)
    prompt = [*range(21)]
    for cached in (0, 20):
        output = llm.generate([prompt], greedy(2))[0]
        chunks = [(int(e.detail["start"]), int(e.detail["tokens"])) for e in events(output, "chunk")]
        rows = [row for start, tokens in chunks for row in range(start, start + tokens)]
        assert events(output, "admitted")[0].detail["cached"] == cached == output.metrics.cached_tokens
        assert rows == list(range(cached, 21))
        assert all(tokens <= budget for _, tokens in chunks)


def test_preempted_requests_say_so_and_resume(toy_llm: ToyLLM) -> None:
    outputs = crowded(toy_llm)
    assert any(output.metrics.preemptions for output in outputs)
    for output in outputs:
        gone = events(output, "preempted")
        assert len(gone) == output.metrics.preemptions
        turns = [event.event for event in events(output, "admitted", "preempted", "resumed")]
        assert turns[0] == "admitted"
        assert all({before, after} & {"preempted"} and before != after for before, after in pairwise(turns))
        for before, after in pairwise(events(output, "preempted", "resumed")):
            if after.event == "resumed":
                assert before.detail["tokens"] == after.detail["tokens"]  # no token was lost


def test_the_cache_is_credited_once(toy_llm: ToyLLM) -> None:
    """What a resumed request finds again is no part of ``cached_tokens``."""
    outputs = crowded(toy_llm, kv_cache__prefix_cache=True)
    assert any(int(event.detail["cached"]) for output in outputs for event in events(output, "resumed"))
    for output in outputs:
        assert output.metrics.cached_tokens == events(output, "admitted")[0].detail["cached"]


def test_recomputed_rows_are_chunks_too(toy_llm: ToyLLM) -> None:
    output = next(o for o in crowded(toy_llm) if o.metrics.preemptions)
    known = int(events(output, "resumed", "admitted")[-1].detail["tokens"])
    back = max(place for place, event in enumerate(output.metrics.timeline) if event.event in ("resumed", "admitted"))
    rows = sum(int(e.detail["tokens"]) for e in output.metrics.timeline[back:] if e.event == "chunk")
    assert rows == known


def test_children_have_their_own_events(toy_llm: ToyLLM) -> None:
    output = toy_llm("Flat").generate([[1, 2]], SamplingParams(n=3, seed=1, max_tokens=5))[0]
    for child in range(3):
        assert names(output, child)[0] == "queued"
        assert names(output, child)[-1] == "finished"
        assert "admitted" in names(output, child)
    assert sum(event.event == "first_token" for event in output.metrics.timeline) == 1
    assert (output.metrics.output_tokens, output.metrics.longest_output) == (15, 5)


def test_an_aborted_request_ends_with_its_reason(toy_llm: ToyLLM) -> None:
    llm = toy_llm("Count")
    request = queue(llm, [1], greedy(50))
    llm.engine.core.step()
    llm.engine.core.abort([request.request_id])
    assert request.metrics.timeline[-1].event == "finished"
    assert request.metrics.timeline[-1].detail["reason"] == "abort"


def test_a_row_without_a_token_is_no_first_token(toy_llm: ToyLLM) -> None:
    llm = toy_llm("Count")
    llm.engine.model.after = lambda logits: logits * float("nan")  # type: ignore[attr-defined]
    output = llm.generate([[1, 2]], greedy(4))[0]
    assert output.error is not None
    assert output.metrics.first_token is None
    assert "first_token" not in names(output)


def test_a_timeline_is_bounded_but_has_its_end(toy_llm: ToyLLM) -> None:
    llm = toy_llm("Count")
    request = queue(llm, [1], greedy(2))
    for step in range(2 * MAX_EVENTS):
        note(request.sequences[0], 0.0, "waiting", reason=str(step))
    assert len(request.metrics.timeline) == MAX_EVENTS
    llm.engine.core.abort([request.request_id])
    assert len(request.metrics.timeline) == MAX_EVENTS + 1
    assert request.metrics.timeline[-1].event == "finished"


# ---- derived times


@pytest.mark.parametrize(
    ("metrics", "tpot"),
    [
        (RequestMetrics(1.0), None),
        (RequestMetrics(1.0, first_token=2.0, longest_output=5), None),
        (RequestMetrics(1.0, first_token=2.0, finished=2.0, longest_output=1), None),
        (RequestMetrics(1.0, first_token=2.0, finished=4.0, longest_output=5), 0.5),
    ],
)
def test_time_per_output_token(metrics: RequestMetrics, tpot: float | None) -> None:
    assert metrics.tpot == tpot


def test_times_of_a_request() -> None:
    metrics = RequestMetrics(10.0, first_scheduled=11.0, first_token=13.0, finished=20.0)
    assert (metrics.queue_time, metrics.ttft, metrics.e2e) == (1.0, 3.0, 10.0)
    assert (RequestMetrics(10.0).queue_time, RequestMetrics(10.0).ttft, RequestMetrics(10.0).e2e) == (None,) * 3


def test_accepted_drafts_are_per_request(toy_llm: ToyLLM) -> None:
    llm = toy_llm("Count", speculation__method="half", plugins__paths=PATHS)
    outputs = llm.generate([[5], [40]], [greedy(9), greedy(3)])
    # Every second draft is wrong, so a step yields two tokens: its first draft and the correction.
    assert [output.metrics.accepted_drafts for output in outputs] == [4, 1]


# ---- why it waits


def queue(llm: LLM, prompt: list[int], params: SamplingParams, request_id: str = "r") -> Request:
    core = llm.engine.core
    request = llm.engine.intake.request(
        request_id, {"prompt_token_ids": prompt}, params, now=core.clock(), stream=False
    )
    core.add([request])
    return request


def test_why_for_want_of_a_place(toy_llm: ToyLLM) -> None:
    llm = toy_llm("Count", scheduling__max_running=1)
    for name in ("a", "b", "c"):
        queue(llm, [1, 2], greedy(5), name)
    llm.engine.core.step()
    assert llm.why_waiting("a") is None  # it runs
    assert "waits for a free slot (0 before it" in str(llm.why_waiting("b"))
    assert "0 of 1 slots" in str(llm.why_waiting("b"))
    assert "its turn; the first in the queue waits for a free slot (1 before it" in str(llm.why_waiting("c"))


def test_why_for_want_of_blocks(toy_llm: ToyLLM) -> None:
    llm = toy_llm("PrefixHash", kv_cache__num_blocks=8)
    queue(llm, [*range(20)], greedy(5), "a")
    queue(llm, [*range(30, 50)], greedy(5), "b")
    llm.engine.core.step()
    assert "waits for free cache blocks (0 before it; free: 2 of 7 cache blocks" in str(llm.why_waiting("b"))


def test_why_after_a_preemption(toy_llm: ToyLLM) -> None:
    llm = toy_llm("Count")
    request = queue(llm, [1, 2], greedy(9))
    llm.engine.core.step()
    llm.engine.core.planner.preemption.preempt(request.sequences[0].slot)
    assert "after it was preempted" in str(llm.why_waiting("r"))


def test_nothing_waits_after_its_end_or_when_it_never_was(toy_llm: ToyLLM) -> None:
    llm = toy_llm("Count")
    queue(llm, [1], greedy(2))
    llm.engine.core.abort(["r"])
    assert llm.why_waiting("r") is None
    assert llm.why_waiting("nobody") is None


def test_reasons_are_noted_when_they_change_and_not_before(toy_llm: ToyLLM) -> None:
    llm = toy_llm("Count", scheduling__max_running=1)
    queue(llm, [1, 2], greedy(20), "a")
    waiting = queue(llm, [1, 2], greedy(2), "b")
    for _ in range(10):
        llm.engine.core.step()
    reasons = [event.detail["reason"] for event in waiting.metrics.timeline if event.event == "waiting"]
    assert reasons == ["a free slot"]
