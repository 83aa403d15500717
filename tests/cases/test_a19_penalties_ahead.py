"""A19 (vllm-project/vllm#27878): one step ahead, sampling sees the token of the step before, not an older history."""

from __future__ import annotations

from typing import Any

import pytest
from toys.checkpoints import EOS_ID, ToyLLM
from toys.checks import assert_clean, ids_of

from deepinfer_core import LLM, SamplingParams

PLAIN = SamplingParams(temperature=0, max_tokens=9)


@pytest.fixture(params=[False, True], ids=["sync", "ahead"])
def llm(request: pytest.FixtureRequest, toy_llm: ToyLLM) -> LLM:
    return toy_llm("Const", scheduling__async_scheduling=request.param)


@pytest.fixture(params=[False, True], ids=["sync", "ahead"])
def text_llm(request: pytest.FixtureRequest, toy_llm: ToyLLM) -> LLM:
    logits = {"97": 2.0, "98": 1.9, str(EOS_ID): 2.5}
    return toy_llm("Const", tokenizer=True, logits=logits, scheduling__async_scheduling=request.param)


CASES: list[tuple[dict[str, Any], list[int]]] = [
    ({"frequency_penalty": 0.5, "max_tokens": 9}, [3, 5, 3, 5, 3, 5, 3, 5, 7]),
    ({"presence_penalty": 0.5, "max_tokens": 5}, [3, 5, 3, 3, 3]),
    ({"repetition_penalty": 4.0, "max_tokens": 5}, [3, 5, 3, 3, 3]),
]


@pytest.mark.parametrize(("params", "expected"), CASES)
def test_penalties(llm: LLM, params: dict[str, Any], expected: list[int]) -> None:
    assert ids_of(llm.generate([1], SamplingParams(temperature=0, **params))) == [expected]


@pytest.mark.parametrize(("params", "expected"), CASES)
@pytest.mark.parametrize("row", [0, 1, 2])
def test_penalties_beside_unpenalised_rows(llm: LLM, params: dict[str, Any], expected: list[int], row: int) -> None:
    batch = [PLAIN] * 3
    batch[row] = SamplingParams(temperature=0, **params)
    outputs = ids_of(llm.generate([[1]] * 3, batch))
    assert outputs[row] == expected
    assert [ids for i, ids in enumerate(outputs) if i != row] == [[3] * 9] * 2
    assert_clean(llm)


def test_bad_words(text_llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=7, bad_words=["aa"], min_tokens=7)
    assert text_llm.generate([[1]], params)[0].outputs[0].text == "abababa"


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 5])
def test_min_tokens(text_llm: LLM, min_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, min_tokens=min_tokens)
    (output,) = text_llm.generate([[1]], params)
    assert output.outputs[0].token_ids == [97] * min_tokens + [EOS_ID]


def test_the_step_after_a_stop_is_discarded(toy_llm: ToyLLM) -> None:
    """COUNT one step ahead computes a row past the stop; it reaches nobody."""
    llm: Any = toy_llm("Count", eos_token_id=20, scheduling__async_scheduling=True)
    (output,) = llm.generate([10], SamplingParams(temperature=0, max_tokens=30, logprobs=0))
    assert output.outputs[0].token_ids == list(range(11, 21))
    assert len(output.outputs[0].logprobs) == 10
    assert llm.engine.model.steps == 11
    assert_clean(llm)
