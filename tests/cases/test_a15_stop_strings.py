"""A15 (vllm-project/vllm#3672): stop strings over token borders, streamed or not, kept or cut."""

from __future__ import annotations

import random
from typing import Any

import pytest
from toys.checkpoints import EOS, EOS_ID, MERGED, ToyLLM
from toys.checks import assert_clean

from deepinfer_core import LLM, SamplingParams

FOO, ND_BAR = 258, 259
E_, N_, X_ = b"ENx"


def both_ways(llm: LLM, params: SamplingParams) -> tuple[str, str | None]:
    """Text and stop reason, the same streamed; no delta is ever taken back."""
    (output,) = llm.generate([[0]], params)
    completion = output.outputs[0]
    deltas = list(llm.stream([0], params))
    assert "".join(delta.text for delta in deltas) == completion.text
    assert [token for delta in deltas for token in delta.token_ids] == completion.token_ids
    assert_clean(llm)
    assert completion.stop_reason is None or isinstance(completion.stop_reason, str)
    return completion.text, completion.stop_reason


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("script", "stop", "include", "text", "reason"),
    [
        ([FOO, E_, ND_BAR, X_], ["END"], False, "foo ", "END"),
        ([FOO, E_, ND_BAR, X_], ["END"], True, "foo END", "END"),
        ([E_, N_, X_], ["END"], False, "ENx", None),
        ([*b"xabc"], ["ab", "abc"], False, "x", "abc"),
        ([*b"xabd"], ["ab", "abc"], False, "x", "ab"),
        ([X_, EOS_ID, X_], [EOS], False, "x", EOS),
        ([X_, EOS_ID, X_], [EOS], True, "x" + EOS, EOS),
    ],
)
def test_the_listed_inputs(
    toy_llm: ToyLLM, ahead: bool, script: list[int], stop: list[str], include: bool, text: str, reason: str | None
) -> None:
    llm = toy_llm("Script", tokenizer=True, script=script, scheduling__async_scheduling=ahead)
    params = SamplingParams(
        temperature=0, max_tokens=len(script), stop=stop, include_stop_str_in_output=include, ignore_eos=True
    )
    assert both_ways(llm, params) == (text, reason)


def first_match(text: str, ends: list[int], stops: list[str]) -> tuple[str, str, int] | None:
    """(text before, stop, tokens) by trying every place: earliest start, then longest."""
    for start in range(len(text)):
        for stop in sorted(stops, key=len, reverse=True):
            if text.startswith(stop, start):
                return text[:start], stop, next(i for i, end in enumerate(ends, 1) if end >= start + len(stop))
    return None


@pytest.mark.parametrize("ahead", [False, True])
def test_random_texts_against_search_in_the_whole_text(toy_llm: ToyLLM, ahead: bool) -> None:
    rng = random.Random(f"{ahead}")
    pieces = {97: "a", 98: "b", 99: "c", **{257 + i: data.decode() for i, data in enumerate(MERGED)}}
    llm: Any = toy_llm("Script", tokenizer=True, scheduling__async_scheduling=ahead)
    for _ in range(12):
        script = [rng.choice([97, 97, 98, 98, 99, *pieces]) for _ in range(24)]
        llm.engine.model.config = {"script": script}
        text = "".join(pieces[token] for token in script)
        ends = [sum(len(pieces[t]) for t in script[: i + 1]) for i in range(24)]
        for _ in range(4):
            stops = ["".join(rng.choice("abc") for _ in range(rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
            params = SamplingParams(temperature=0, max_tokens=24, stop=stops)
            found = first_match(text, ends, stops)
            assert both_ways(llm, params) == ((text, None) if found is None else found[:2])
            ids = llm.generate([[0]], params)[0].outputs[0].token_ids
            assert len(ids) == (24 if found is None else found[2])
