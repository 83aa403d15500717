"""One result per prompt, in order, always; the engine stays usable."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from toys.checks import assert_clean, ends_of, ids_of
from toys.oracle import HashOracle, count_tokens

from deepinfer_core import SamplingParams
from deepinfer_core.api import InvalidRequestError


@pytest.fixture(params=[False, True], ids=["sync", "ahead"])
def ahead(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_results_are_in_order_whatever_ends_first(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("Count", scheduling__async_scheduling=ahead, scheduling__max_running=3)
    lengths = [9, 1, 5, 2, 8, 3, 1, 7]
    prompts = [[10 * i % 60] for i in range(8)]
    outputs = llm.generate(prompts, [SamplingParams(temperature=0, max_tokens=n) for n in lengths])
    assert ids_of(outputs) == [count_tokens(p, n, 64) for p, n in zip(prompts, lengths, strict=True)]
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert ends_of(outputs) == ["length"] * 8
    assert all(output.finished and output.error is None for output in outputs)
    assert len({output.request_id for output in outputs}) == 8
    assert_clean(llm)


def test_results_of_prompts_longer_than_a_step(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("PrefixHash", scheduling__async_scheduling=ahead, scheduling__max_batch_tokens=7)
    oracle = HashOracle(64, [None])
    prompts = [[(7 * i + j) % 64 for j in range(1 + 5 * i)] for i in range(8)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6))
    assert ids_of(outputs) == [oracle.tokens(p, 6) for p in prompts]
    assert_clean(llm)


def test_one_parameter_set_for_each_prompt(toy_llm: Any) -> None:
    llm = toy_llm("Count")
    with pytest.raises(InvalidRequestError, match="2 entries for 3 prompts"):
        llm.generate([[1], [2], [3]], [SamplingParams()] * 2)
    with pytest.raises(InvalidRequestError, match="sampling_params"):
        llm.generate([[1]], ["greedy"])
    assert_clean(llm)


def test_defaults_without_parameters(toy_llm: Any) -> None:
    (output,) = toy_llm("Count").generate([3])
    assert len(output.outputs[0].token_ids) == 16


def test_closed_engine_refuses(toy_llm: Any) -> None:
    llm = toy_llm("Count")
    llm.close()
    llm.close()
    with pytest.raises(InvalidRequestError, match="closed"):
        llm.generate([3])


def test_metrics_of_a_request(toy_llm: Any) -> None:
    llm = toy_llm("Count")
    prompt = [7] * 12
    first, second = (llm.generate(prompt, SamplingParams(max_tokens=4))[0].metrics for _ in range(2))
    assert first.arrival <= first.first_scheduled <= first.first_token <= first.finished
    assert (first.cached_tokens, second.cached_tokens) == (0, 11)
    assert (first.preemptions, second.preemptions) == (0, 0)


def test_rejected_by_the_policy_is_one_result(toy_llm: Any) -> None:
    llm = toy_llm("Count")
    policy = llm.engine.core.planner.policy
    from deepinfer_core.api import Admit

    policy.admit = lambda request, view: Admit(request.prompt_len < 4, "too long today")
    outputs = llm.generate([[1], [2] * 9, [3]], SamplingParams(temperature=0, max_tokens=2))
    assert ids_of(outputs) == [[2, 3], [], [4, 5]]
    assert ends_of(outputs) == ["length", "error", "length"]
    assert outputs[1].error.code == "rejected"
    assert "too long today" in outputs[1].error.message
    assert_clean(llm)


def test_abort_mid_way_keeps_what_was_committed(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("Count", scheduling__async_scheduling=ahead)
    core, intake = llm.engine.core, llm.engine.intake
    params = SamplingParams(temperature=0, max_tokens=50)
    one, two = (intake.request(str(i), [i], params, now=0.0, stream=False) for i in range(2))
    core.add([one, two])
    while llm.engine.core.planner.slots.output_len(one.sequences[0]) < 5:
        core.step()
    assert core.abort(["0"]).finished == [one]
    known = llm.output(one).outputs[0]
    assert known.finish_reason == "abort"
    assert known.token_ids == count_tokens([0], len(known.token_ids), 64)
    while core.has_unfinished:
        core.step()
    assert llm.output(one).outputs[0] == known
    assert llm.output(two).outputs[0].token_ids == count_tokens([1], 50, 64)
    assert_clean(llm)


def test_evolving_parameters_keeps_the_rest() -> None:
    params = SamplingParams(logit_bias={3: 1.5}, extra_args={"x": 2.0}, stop="a", temperature=0.5)
    assert attrs.evolve(params, temperature=0.5) == params
