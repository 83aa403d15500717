"""A18 (tenstorrent/vllm-tt-plugin#52): a resumed request replays in chunks and says nothing until it is done."""

from __future__ import annotations

from typing import Any

import pytest
from toys.checkpoints import EOS_ID, ToyLLM
from toys.checks import assert_clean, facts
from toys.oracle import HashOracle, count_tokens

from deepinfer_core import LLM, RequestOutput, SamplingParams

PROMPT = [9, 8, 7, 6, 5, 4]
VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "presence": {"temperature": 0, "presence_penalty": 1.5, "repetition_penalty": 1.3},
    "seeded": {"seed": 3, "temperature": 0.9},
    "prompt_logprobs": {"temperature": 0, "prompt_logprobs": 2, "logprobs": 2},
    "stop": {"temperature": 0, "stop": ["zz"], "min_tokens": 4},
}


def run(llm: LLM, params: SamplingParams, preempt_at: list[int]) -> tuple[RequestOutput, list[int]]:
    """The result, and how many outputs were known after each step.

    ``preempt_at``: each number is so many outputs, or when negative so many replayed chunks, before the next one.
    """
    core: Any = llm.engine.core
    request: Any = llm.engine.intake.request("0", PROMPT, params, now=0.0, stream=True)
    (sequence,) = request.sequences
    core.add([request])
    known, todo, chunks = [], list(preempt_at), 0
    while not request.finished:
        core.step()
        known.append(core.planner.slots.output_len(sequence))
        chunks += 1
        if todo and sequence.slot >= 0 and (known[-1] >= todo[0] if todo[0] >= 0 else chunks >= -todo[0]):
            core.drain()
            if request.finished:
                break
            known.append(core.planner.slots.output_len(sequence))
            core.planner.preemption.preempt(sequence.slot)
            todo.pop(0)
            chunks = 0
    assert not todo
    core.drain()
    return llm.output(request), known


@pytest.mark.parametrize("preempt_at", [[5], [5, -1], [5, -2, -1], [1, 3, 9], [0], [-1, 4]], ids=str)
@pytest.mark.parametrize("prefix_cache", [False, True], ids=["cold", "cached"])
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_changes(toy_llm: ToyLLM, variant: str, ahead: bool, prefix_cache: bool, preempt_at: list[int]) -> None:
    params = SamplingParams(max_tokens=12, **VARIANTS[variant])
    options: dict[str, Any] = {"vocab_size": 320, "tokenizer": True, "kv_cache__prefix_cache": prefix_cache}
    whole = toy_llm("PrefixHash", **options)
    (wanted,) = whole.generate([PROMPT], params)
    llm = toy_llm("PrefixHash", scheduling__max_batch_tokens=4, scheduling__async_scheduling=ahead, **options)
    output, known = run(llm, params, preempt_at)
    assert facts(output) == facts(wanted)
    assert output.metrics.preemptions == len(preempt_at)
    assert known == sorted(known)
    assert_clean(llm)


def test_replay_of_eleven_tokens_in_chunks_of_four(toy_llm: ToyLLM) -> None:
    llm: Any = toy_llm("Count", kv_cache__prefix_cache=False, scheduling__max_batch_tokens=4)
    rows: list[int] = []
    llm.engine.model.before = lambda batch: rows.append(len(batch.positions))
    output, known = run(llm, SamplingParams(temperature=0, max_tokens=8), [5])
    assert output.outputs[0].token_ids == count_tokens(PROMPT, 8, 64)
    assert rows == [4, 2, 1, 1, 1, 1, 4, 4, 3, 1, 1]
    assert known == [0, 1, 2, 3, 4, 5, 5, 5, 5, 6, 7, 8]


@pytest.mark.parametrize("preempt_at", [[3], [5, -1], [1, 2, 4, 6]], ids=str)
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
def test_outputs_still_count_as_outputs(toy_llm: ToyLLM, ahead: bool, preempt_at: list[int]) -> None:
    llm = toy_llm("Const", scheduling__max_batch_tokens=4, scheduling__async_scheduling=ahead)
    output, _ = run(llm, SamplingParams(temperature=0, max_tokens=9, frequency_penalty=0.5), preempt_at)
    assert output.outputs[0].token_ids == [3, 5, 3, 5, 3, 5, 3, 5, 7]


@pytest.mark.parametrize("preempt_at", [[0], [3], [4, 5], [5], [1, -1, 3]], ids=str)
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
def test_min_tokens_are_those_of_the_whole_output(toy_llm: ToyLLM, ahead: bool, preempt_at: list[int]) -> None:
    """A resumed request owes what is left of its least length, not all of it again."""
    llm = toy_llm(
        "Const",
        tokenizer=True,
        logits={"97": 2.0, str(EOS_ID): 2.5},
        scheduling__max_batch_tokens=4,
        scheduling__async_scheduling=ahead,
    )
    output, _ = run(llm, SamplingParams(temperature=0, max_tokens=12, min_tokens=6), preempt_at)
    assert output.outputs[0].token_ids == [97] * 6 + [EOS_ID]
    assert output.outputs[0].finish_reason == "stop"


def test_neighbours_of_a_preempted_request(toy_llm: ToyLLM) -> None:
    llm: Any = toy_llm("PrefixHash", kv_cache__num_blocks=8, scheduling__max_batch_tokens=4)
    prompts = [[i] * 6 for i in range(3)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=14))
    assert llm.engine.core.planner.preemption.count > 0
    oracle = HashOracle(64, [None])
    assert [o.outputs[0].token_ids for o in outputs] == [oracle.tokens(p, 14) for p in prompts]
    assert_clean(llm)
