"""Out of memory in a step: the engine backs off, tries again, and no result changes."""

from __future__ import annotations

from typing import Any

import pytest
from toys.checkpoints import ToyLLM
from toys.oracle import count_tokens

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.api import ModelBatch


def greedy(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, **more)


def fail_above(llm: LLM, rows: int) -> list[int]:
    """The device has room for ``rows`` rows a step; returns the sizes that failed."""
    failed: list[int] = []

    def before(batch: ModelBatch) -> None:
        if len(batch.token_ids) > rows:
            failed.append(len(batch.token_ids))
            raise MemoryError("no room")

    llm.engine.model.before = before  # type: ignore[attr-defined]
    return failed


@pytest.mark.parametrize("ahead", [False, True])
def test_smaller_steps_are_tried_until_they_fit(toy_llm: ToyLLM, ahead: bool) -> None:
    llm = toy_llm("Count", scheduling__async_scheduling=ahead)
    failed = fail_above(llm, 5)
    outputs = llm.generate([[i] * 9 for i in range(6)], greedy(7))
    assert [o.outputs[0].token_ids for o in outputs] == [count_tokens([i], 7, 64) for i in range(6)]
    assert failed
    assert llm.engine.core.planner.cache.free_blocks == llm.engine.core.planner.cache.total_blocks


def test_prompt_logprobs_survive_a_lost_step(toy_llm: ToyLLM) -> None:
    llm = toy_llm("PrefixHash")
    prompt = list(range(20))
    want = llm.generate([prompt], greedy(3, prompt_logprobs=2))[0]
    fail_above(llm, 7)
    got = llm.generate([prompt], greedy(3, prompt_logprobs=2))[0]
    assert got.prompt_logprobs == want.prompt_logprobs
    assert got.outputs[0].token_ids == want.outputs[0].token_ids


def test_no_room_at_all_ends_the_request_and_not_the_engine(toy_llm: ToyLLM) -> None:
    llm = toy_llm("Count")
    fail_above(llm, 0)
    (output,) = llm.generate([[1, 2, 3]], greedy(4))
    assert output.error is not None
    assert output.error.code == "out_of_memory"
    llm.engine.model.before = lambda batch: None  # type: ignore[attr-defined]
    assert llm.generate([[1, 2, 3]], greedy(4))[0].outputs[0].token_ids == count_tokens([3], 4, 64)


def test_budget_grows_back_when_memory_is_found_again(toy_llm: ToyLLM) -> None:
    llm = toy_llm("Count", scheduling__max_batch_tokens=16)
    fail_above(llm, 3)
    llm.generate([[1] * 10], greedy(2))
    planner = llm.engine.core.planner
    assert planner.budget < 16
    llm.engine.model.before = lambda batch: None  # type: ignore[attr-defined]
    for _ in range(5):
        llm.generate([[1]], greedy(100))
    assert planner.budget == 16


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("room", [1, 2, 3])
def test_requests_take_turns_when_a_step_has_room_for_few(toy_llm: ToyLLM, ahead: bool, room: int) -> None:
    """Five that run, and steps of fewer rows: nobody waits for another's end."""
    llm = toy_llm("Count", scheduling__async_scheduling=ahead)
    core, slots = llm.engine.core, llm.engine.core.planner.slots
    requests = [llm.engine.intake.request(str(i), [i], greedy(20), now=0.0, stream=False) for i in range(5)]
    core.add(requests)
    core.step()
    core.step()
    core.planner.budget = room
    while core.has_unfinished:
        core.step()
        known = [slots.output_len(sequence) for request in requests for sequence in request.sequences]
        assert max(known) - min(known) <= 1 + ahead
        if min(known) < 20:
            core.planner.budget = room
    assert [llm.output(r).outputs[0].token_ids for r in requests] == [count_tokens([i], 20, 64) for i in range(5)]
