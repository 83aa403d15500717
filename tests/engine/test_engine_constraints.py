"""Penalties, bans, biases and allowed ids on CONST, against brute force in plain Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toys.checkpoints import EOS_ID, open_toy, write_toy
from toys.checks import assert_clean, ids_of
from toys.oracle import const_logits, draw

from deepinfer_core import SamplingParams

CONST = {3: 2.0, 5: 1.9, 7: 0.2}
PROMPT = [3, 7, 3]


@pytest.fixture(params=[False, True], ids=["sync", "ahead"])
def ahead(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def brute_force(count: int, *, seed: int | None = None, **p: Any) -> list[int]:
    """The rules, one after another, for one token at a time. float32 where the engine's result may hang on it."""
    known = list(PROMPT)
    f = np.float32
    for _ in range(count):
        logits = const_logits(CONST, 16)
        allowed = p.get("allowed_token_ids")
        if allowed is not None:
            logits = np.where(np.isin(np.arange(16), allowed), logits, f(-np.inf))
        for token, bias in p.get("logit_bias", {}).items():
            logits[token] += f(bias)
        output = known[len(PROMPT) :]
        for token in set(known):
            repetition = f(p.get("repetition_penalty", 1.0))
            logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        for token in set(output):
            logits[token] -= f(p.get("frequency_penalty", 0.0)) * f(output.count(token))
            logits[token] -= f(p.get("presence_penalty", 0.0))
        known.append(draw(logits, 0.0 if seed is None else 1.0, seed or 0, 0, len(known)))
    return known[len(PROMPT) :]


CASES: list[dict[str, Any]] = [
    {"frequency_penalty": 0.5},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.7},
    {"presence_penalty": -2.0, "logit_bias": {9: 6.95}},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.5},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    {"logit_bias": {9: 7.5, 3: -1.0}},
    {"logit_bias": {9: -100.0, 5: 0.25, 15: 6.0}, "frequency_penalty": 1.0},
    {"allowed_token_ids": [5, 7]},
    {"allowed_token_ids": [0, 15]},
    {"allowed_token_ids": [7], "logit_bias": {3: 100.0}},
    {"allowed_token_ids": [5, 7, 9], "frequency_penalty": 0.6},
]


@pytest.mark.parametrize("params", CASES, ids=lambda p: "-".join(p))
def test_greedy(toy_llm: Any, ahead: bool, params: dict[str, Any]) -> None:
    llm = toy_llm("Const", scheduling__async_scheduling=ahead)
    assert ids_of(llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12, **params))) == [
        brute_force(12, **params)
    ]


@pytest.mark.parametrize("params", CASES, ids=lambda p: "-".join(p))
def test_sampled(toy_llm: Any, ahead: bool, params: dict[str, Any]) -> None:
    llm = toy_llm("Const", scheduling__async_scheduling=ahead)
    assert ids_of(llm.generate(PROMPT, SamplingParams(seed=4, max_tokens=12, **params))) == [
        brute_force(12, seed=4, **params)
    ]


def test_all_in_one_batch(toy_llm: Any, ahead: bool) -> None:
    """Rows do not mix, and slots that change hands keep nothing of their last owner."""
    llm = toy_llm("Const", scheduling__async_scheduling=ahead, scheduling__max_running=4)
    batch = [SamplingParams(temperature=0, max_tokens=9 + i % 3, **p) for i, p in enumerate([*CASES, {}, *CASES])]
    outputs = llm.generate([PROMPT] * len(batch), batch)
    for i, (ids, params) in enumerate(zip(ids_of(outputs), [*CASES, {}, *CASES], strict=True)):
        assert ids == brute_force(9 + i % 3, **params)
    assert_clean(llm)


DIRTY: list[dict[str, Any]] = [
    {"bad_words": ["a", "ba", "bbb"]},
    {"allowed_token_ids": [98, 99]},
    {"logit_bias": {97: -50.0, 98: -50.0}},
    {"min_tokens": 4},
    {"stop_token_ids": [97]},
    {"temperature": 2.0, "seed": 1, "top_k": 1, "top_p": 0.1, "min_p": 1.0},
    {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 5.0},
    {"logprobs": 5, "logprobs_mode": "processed"},
    {"stop": ["a"]},
]
CLEAN: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "frequency_penalty": 0.5},
    {"temperature": 0, "bad_words": ["aa"]},
    {"temperature": 0, "min_tokens": 3, "logprobs": 1},
    {"seed": 3, "logit_bias": {99: 5.0}},
    {"seed": 4, "allowed_token_ids": [97, 98]},
    {"seed": 5, "top_k": 2},
]


def test_a_slot_keeps_nothing_of_its_last_owner(toy_llm: Any, ahead: bool) -> None:
    """One slot, taken by every kind of request after every other kind."""
    options: dict[str, Any] = {"tokenizer": True, "logits": {"97": 3.0, "98": 2.9, "256": 1.5}}
    params = [SamplingParams(**{"max_tokens": 6} | clean) for clean in CLEAN]
    fresh = [toy_llm("Const", **options).generate([[1]], one)[0].outputs for one in params]
    llm = toy_llm("Const", scheduling__max_running=1, scheduling__async_scheduling=ahead, **options)
    for dirty in DIRTY:
        for one, wanted in zip(params, fresh, strict=True):
            _, output = llm.generate([[1]] * 2, [SamplingParams(**{"temperature": 0, "max_tokens": 6} | dirty), one])
            assert output.outputs == wanted
    assert_clean(llm)


# ---- order of the stages


@pytest.mark.parametrize("filters", [{"min_p": 0.05, "top_k": 3}, {"top_k": 2}])
def test_stages_run_in_the_written_order(toy_llm: Any, filters: dict[str, Any]) -> None:
    """The contract's worked vector: only id 0 is left; any other order keeps id 1 too or takes another."""
    llm = toy_llm("Const", vocab_size=4, logits={"0": 2.0, "1": 1.0, "2": 0.0, "3": 9.0})
    for seed in range(8):
        steps: list[int] = []

        def twos_first(logits: Any, steps: list[int] = steps) -> Any:
            steps.append(0)
            if len(steps) <= 2:
                logits[:, 2] = 50.0
            return logits

        llm.engine.model.after = twos_first
        params = SamplingParams(
            allowed_token_ids=[0, 1, 2], logit_bias={2: 3.0}, frequency_penalty=1.0, repetition_penalty=2.0,
            temperature=0.5, top_p=0.88, seed=seed, max_tokens=3, logprobs=4, logprobs_mode="processed", **filters,
        )  # fmt: skip
        completion = llm.generate([[1]], params)[0].outputs[0]
        assert completion.token_ids == [2, 2, 0]
        assert completion.logprobs[2][0].logprob == 0.0


# ---- bad words


def test_bad_word_of_one_token(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("Const", tokenizer=True, logits={"97": 3.0, "98": 2.0}, scheduling__async_scheduling=ahead)
    (output,) = llm.generate([[1]], SamplingParams(temperature=0, max_tokens=4, bad_words=["a"]))
    assert output.outputs[0].text == "bbbb"


def test_bad_word_of_several_tokens_blocks_its_last_one_only(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("Const", tokenizer=True, logits={"97": 3.0, "98": 2.0}, scheduling__async_scheduling=ahead)
    (output,) = llm.generate([[1]], SamplingParams(temperature=0, max_tokens=8, bad_words=["aaa", "bb"]))
    assert output.outputs[0].text == "aabaabaa"


def test_bad_word_begun_in_the_prompt(toy_llm: Any) -> None:
    llm = toy_llm("Const", tokenizer=True, logits={"97": 3.0, "98": 2.0})
    (output,) = llm.generate("aa", SamplingParams(temperature=0, max_tokens=3, bad_words=["aaa"]))
    assert output.outputs[0].text == "baa"


@pytest.mark.parametrize(("words", "text"), [([], " a a"), (["a"], "bb"), ([" a"], "aa"), (["b"], " a a")])
def test_bad_words_count_after_a_space_too(tmp_path: Path, words: list[str], text: str) -> None:
    """A word that has a token of its own with the space before it."""
    directory = write_toy(tmp_path, "Const", tokenizer=True, logits={"257": 2.0, "97": 1.9, "98": 1.8})
    file = directory / "tokenizer.json"
    data = json.loads(file.read_text())
    vocabulary = {text: token for text, token in data["model"]["vocab"].items() if token != 257}
    data["model"] |= {"vocab": vocabulary | {"Ġa": 257}, "merges": [["Ġ", "a"]]}
    file.write_text(json.dumps(data))
    with open_toy(directory) as llm:
        (output,) = llm.generate([[1]], SamplingParams(temperature=0, max_tokens=2, bad_words=words))
    assert output.outputs[0].text == text


def test_bad_words_of_one_request_do_not_touch_another(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("Const", tokenizer=True, logits={"97": 3.0, "98": 2.0}, scheduling__async_scheduling=ahead)
    bans: list[list[str]] = [["a"], [], ["aaaa", "b"], ["ab", "aa"], [], ["a"]]
    params = [SamplingParams(temperature=0, max_tokens=5, bad_words=b) for b in bans]
    texts = [o.outputs[0].text for o in llm.generate([[1]] * 6, params)]
    assert texts == ["bbbbb", "aaaaa", "aaa\x00a", "a\x00a\x00a", "aaaaa", "bbbbb"]


# ---- nothing left


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_no_token_left_ends_that_request(toy_llm: Any, ahead: bool, temperature: float) -> None:
    llm = toy_llm("Const", tokenizer=True, logits={"97": 3.0, "98": 2.0}, scheduling__async_scheduling=ahead)
    nothing = SamplingParams(temperature=temperature, allowed_token_ids=[EOS_ID], min_tokens=3)
    normal = SamplingParams(temperature=0, max_tokens=4)
    outputs = llm.generate([[1], [2], [3]], [normal, nothing, normal])
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert outputs[1].error.code == "no_allowed_token"
    assert outputs[1].outputs[0].token_ids == []
    assert [o.outputs[0].text for o in outputs] == ["aaaa", "", "aaaa"]
    assert_clean(llm)


def test_no_token_left_after_a_while_keeps_what_was_made(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("Const", tokenizer=True, logits={"97": 3.0, "98": 2.0}, scheduling__async_scheduling=ahead)
    (output,) = llm.generate(
        [[1]], SamplingParams(temperature=0, allowed_token_ids=[97], bad_words=["aaa"], logprobs=0)
    )
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("aa", "error")
    assert len(output.outputs[0].logprobs) == 2
    assert output.error.code == "no_allowed_token"
    assert_clean(llm)
