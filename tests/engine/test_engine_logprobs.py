"""Log-probabilities of output and prompt: values, ranks, shapes; raw and processed."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest
from toys.oracle import HashOracle, const_logits, log_softmax

from deepinfer_core import Logprob, SamplingParams

CONST = {3: 2.0, 5: 1.9, 7: 0.2}
EXPECTED = log_softmax(const_logits(CONST, 16))
PROMPT = [9, 8, 7, 6, 5, 4, 3, 2, 1]
ORACLE = HashOracle(64, [None])


@pytest.fixture(params=[False, True], ids=["sync", "ahead"])
def ahead(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_none_unless_asked(toy_llm: Any) -> None:
    (output,) = toy_llm("Const").generate([3], SamplingParams())
    assert output.outputs[0].logprobs is None
    assert output.prompt_logprobs is None


def test_best_tokens_of_const(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("Const", scheduling__async_scheduling=ahead)
    (output,) = llm.generate([3], SamplingParams(temperature=0, max_tokens=4, logprobs=3))
    assert len(output.outputs[0].logprobs) == 4
    for entry in output.outputs[0].logprobs:
        assert list(entry) == [3, 5, 7]
        assert [e.rank for e in entry.values()] == [1, 2, 3]
        assert [e.logprob for e in entry.values()] == pytest.approx(EXPECTED[[3, 5, 7]].tolist(), abs=1e-5)
        assert entry[3].logprob - entry[5].logprob == pytest.approx(0.1, abs=1e-5)


def test_chosen_token_is_always_listed(toy_llm: Any) -> None:
    (output,) = toy_llm("Const").generate([3], SamplingParams(seed=1, temperature=3.0, max_tokens=40, logprobs=1))
    completion = output.outputs[0]
    assert len(set(completion.token_ids)) > 3
    order = sorted(range(16), key=lambda token: (-EXPECTED[token], token))
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert set(entry) == {3, token}
        assert entry[token].rank == order.index(token) + 1
        assert entry[token].logprob == pytest.approx(EXPECTED[token], abs=1e-5)


def test_zero_lists_the_chosen_token_alone(toy_llm: Any) -> None:
    (output,) = toy_llm("Const").generate([3], SamplingParams(seed=1, max_tokens=5, logprobs=0))
    assert [list(e) for e in output.outputs[0].logprobs] == [[t] for t in output.outputs[0].token_ids]


def test_minus_one_lists_the_vocabulary(toy_llm: Any) -> None:
    (output,) = toy_llm("Const").generate([3], SamplingParams(max_tokens=2, logprobs=-1))
    for entry in output.outputs[0].logprobs:
        assert sorted(entry) == list(range(16))
        assert math.fsum(math.exp(e.logprob) for e in entry.values()) == pytest.approx(1, abs=1e-6)


def test_more_than_the_vocabulary_is_the_vocabulary(toy_llm: Any) -> None:
    (output,) = toy_llm("Const").generate([3], SamplingParams(max_tokens=1, logprobs=1000))
    assert len(output.outputs[0].logprobs[0]) == 16


def test_each_request_gets_its_own_count(toy_llm: Any) -> None:
    params = [SamplingParams(temperature=0, max_tokens=2, logprobs=k) for k in (1, 4, None, 0)]
    outputs = toy_llm("Const").generate([[1]] * 4, params)
    assert [o.outputs[0].logprobs and [len(e) for e in o.outputs[0].logprobs] for o in outputs] == [
        [1, 1],
        [4, 4],
        None,
        [1, 1],
    ]


def test_raw_values_ignore_what_sampling_does(toy_llm: Any) -> None:
    llm = toy_llm("Const")
    params = SamplingParams(
        temperature=0.5, top_k=1, logit_bias={5: 3.0}, presence_penalty=1.0, allowed_token_ids=[5],
        max_tokens=3, logprobs=2,
    )  # fmt: skip
    (output,) = llm.generate([3], params)
    assert output.outputs[0].token_ids == [5, 5, 5]
    for entry in output.outputs[0].logprobs:
        assert list(entry) == [3, 5]
        assert [e.logprob for e in entry.values()] == pytest.approx(EXPECTED[[3, 5]].tolist(), abs=1e-5)


def test_processed_values_are_those_drawn_from(toy_llm: Any) -> None:
    llm = toy_llm("Const")
    params = SamplingParams(temperature=0.5, top_k=2, seed=3, max_tokens=8, logprobs=3, logprobs_mode="processed")
    (output,) = llm.generate([3], params)
    expected = log_softmax(np.array([2.0, 1.9]) / 0.5)
    for entry in output.outputs[0].logprobs:
        assert list(entry)[:2] == [3, 5]
        assert [entry[3].logprob, entry[5].logprob] == pytest.approx(expected.tolist(), abs=1e-5)
        assert list(entry.values())[2].logprob == -math.inf


@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_processed_values_of_greedy_rows_do_not_depend_on_neighbours(toy_llm: Any, filters: dict[str, Any]) -> None:
    llm = toy_llm("Const")
    greedy = SamplingParams(temperature=0, max_tokens=3, logprobs=4, logprobs_mode="processed", **filters)
    alone = llm.generate([1], greedy)[0]
    beside = llm.generate([[1], [2]], [greedy, SamplingParams(seed=1, max_tokens=3, **filters)])[0]
    assert alone.outputs[0].logprobs == beside.outputs[0].logprobs


def test_raw_and_processed_in_one_batch(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("Const", scheduling__async_scheduling=ahead)
    common: dict[str, Any] = {"temperature": 0.5, "seed": 1, "max_tokens": 3, "logprobs": 2}
    modes: list[Literal["raw", "processed"]] = ["processed", "raw", "processed", "raw"]
    outputs = llm.generate([[1]] * 4, [SamplingParams(logprobs_mode=m, **common) for m in modes])
    for mode, output in zip(modes, outputs, strict=True):
        wanted = log_softmax(const_logits(CONST, 16) / (0.5 if mode == "processed" else 1.0))
        for entry in output.outputs[0].logprobs:
            for token, value in entry.items():
                assert value.logprob == pytest.approx(wanted[token], abs=1e-5)


def test_decoded_tokens(toy_llm: Any) -> None:
    llm = toy_llm("Const", tokenizer=True, logits={"97": 3.0, "98": 2.0})
    (output,) = llm.generate([[1]], SamplingParams(temperature=0, max_tokens=1, logprobs=2))
    assert [(t, e.decoded_token) for t, e in output.outputs[0].logprobs[0].items()] == [(97, "a"), (98, "b")]


def test_without_a_tokenizer_there_is_no_text(toy_llm: Any) -> None:
    (output,) = toy_llm("Const").generate([3], SamplingParams(temperature=0, max_tokens=1, logprobs=1))
    (entry,) = output.outputs[0].logprobs[0].values()
    assert isinstance(entry, Logprob)
    assert entry.decoded_token is None


# ---- prompt


@pytest.mark.parametrize("chunk", [1, 2, 4, 5, 9, 64])
@pytest.mark.parametrize("n", [1, 3])
def test_prompt_logprobs(toy_llm: Any, ahead: bool, chunk: int, n: int) -> None:
    llm = toy_llm("PrefixHash", scheduling__async_scheduling=ahead, scheduling__max_batch_tokens=chunk)
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, n=n))
    assert len(output.prompt_logprobs) == len(PROMPT)
    assert output.prompt_logprobs[0] is None
    for place in range(1, len(PROMPT)):
        expected = log_softmax(ORACLE.logits(PROMPT[:place]))
        entry, token = output.prompt_logprobs[place], PROMPT[place]
        best = sorted(range(64), key=lambda t: (-expected[t], t))
        assert set(entry) == {*best[:2], token}
        assert entry[token].rank == best.index(token) + 1
        for listed, value in entry.items():
            assert value.logprob == pytest.approx(expected[listed], abs=1e-5)
    assert [c.token_ids for c in output.outputs] == [ORACLE.tokens(PROMPT, 3)] * n


def test_prompt_of_one_token(toy_llm: Any) -> None:
    (output,) = toy_llm("Const").generate([3], SamplingParams(prompt_logprobs=1, max_tokens=1))
    assert output.prompt_logprobs == [None]


def test_prompt_logprobs_beside_strangers(toy_llm: Any) -> None:
    llm = toy_llm("PrefixHash", scheduling__max_batch_tokens=7)
    alone = llm.generate(PROMPT, SamplingParams(temperature=0, prompt_logprobs=1))[0]
    asked = [SamplingParams(temperature=0, prompt_logprobs=k) for k in (None, 1, 3, -1)]
    outputs = llm.generate([[5] * 9, PROMPT, PROMPT, PROMPT], asked)
    assert outputs[0].prompt_logprobs is None
    assert outputs[1].prompt_logprobs == alone.prompt_logprobs
    assert [len(e) for e in outputs[3].prompt_logprobs[1:]] == [64] * 8


def test_prompt_logprobs_do_not_read_the_prefix_cache_but_write_it(toy_llm: Any) -> None:
    llm = toy_llm("PrefixHash")
    params = SamplingParams(temperature=0, prompt_logprobs=0, max_tokens=1)
    first, second = (llm.generate(PROMPT, params)[0] for _ in range(2))
    assert (first.metrics.cached_tokens, second.metrics.cached_tokens) == (0, 0)
    assert second.prompt_logprobs == first.prompt_logprobs
    assert llm.generate(PROMPT, SamplingParams(temperature=0))[0].metrics.cached_tokens == 8
