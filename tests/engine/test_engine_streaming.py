"""Streams: deltas add up, come as they are made, and leave nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
from toys.checkpoints import EOS_ID
from toys.checks import assert_clean, ids_of
from toys.oracle import HashOracle, count_tokens

from deepinfer_core import SamplingParams, StreamDelta
from deepinfer_core.api import InvalidRequestError

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(params=[False, True], ids=["sync", "ahead"])
def ahead(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def tokens(deltas: list[StreamDelta], index: int = 0) -> list[int]:
    return [token for delta in deltas if delta.index == index for token in delta.token_ids]


def test_deltas_add_up_to_the_result(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("Count", tokenizer=True, count_mod=256, scheduling__async_scheduling=ahead)
    (whole,) = llm.generate("ab", GREEDY)
    deltas = list(llm.stream("ab", GREEDY))
    assert "".join(delta.text for delta in deltas) == whole.outputs[0].text == "cdefghij"
    assert tokens(deltas) == whole.outputs[0].token_ids
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == "length"
    assert_clean(llm)


def test_a_delta_comes_with_each_step(toy_llm: Any) -> None:
    llm = toy_llm("Count")
    stream = llm.stream([5], GREEDY)
    for expected in count_tokens([5], 4, 64):
        assert next(stream).token_ids == [expected]
    stream.close()
    assert_clean(llm)


def test_closing_aborts(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("PrefixHash", scheduling__async_scheduling=ahead, scheduling__max_batch_tokens=4)
    for steps in range(6):
        stream = llm.stream(list(range(10)), SamplingParams(max_tokens=50))
        for _ in range(steps):
            next(stream)
        stream.close()
        assert_clean(llm)


def test_a_stream_that_never_starts_costs_nothing(toy_llm: Any) -> None:
    llm = toy_llm("Count")
    stream = llm.stream([5], GREEDY)
    assert_clean(llm)
    del stream
    assert_clean(llm)


def test_bad_prompts_are_refused_at_the_call(toy_llm: Any) -> None:
    llm = toy_llm("Count")
    with pytest.raises(InvalidRequestError, match="99"):
        llm.stream([99], GREEDY)


def test_children_of_one_stream(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("PrefixHash", scheduling__async_scheduling=ahead)
    params = SamplingParams(n=3, seed=8, max_tokens=7)
    deltas = list(llm.stream([1, 2, 3], params))
    oracle = HashOracle(64, [None])
    for child in range(3):
        assert tokens(deltas, child) == oracle.tokens([1, 2, 3], 7, temperature=1.0, seed=8, child=child)
        assert [d.finish_reason for d in deltas if d.index == child and d.finish_reason] == ["length"]
    assert_clean(llm)


def test_a_batch_inside_a_stream(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("Count", scheduling__async_scheduling=ahead)
    stream = llm.stream([5], SamplingParams(temperature=0, max_tokens=20))
    first = [next(stream) for _ in range(3)]
    assert ids_of(llm.generate([[1], [2]], GREEDY)) == [count_tokens([i], 8, 64) for i in (1, 2)]
    assert tokens([*first, *stream]) == count_tokens([5], 20, 64)
    assert_clean(llm)


def test_two_streams_taken_in_turns(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("Count", scheduling__async_scheduling=ahead)
    streams = [llm.stream([i], SamplingParams(temperature=0, max_tokens=9 + i)) for i in range(2)]
    deltas: list[list[StreamDelta]] = [[], []]
    for _ in range(5):
        for stream, got in zip(streams, deltas, strict=True):
            got.append(next(stream))
    for i, stream in enumerate(streams):
        deltas[i].extend(stream)
        assert tokens(deltas[i]) == count_tokens([i], 9 + i, 64)
    assert_clean(llm)


def test_errors_come_as_the_last_delta(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("Const", tokenizer=True, logits={"97": 3.0}, scheduling__async_scheduling=ahead)
    params = SamplingParams(temperature=0, allowed_token_ids=[97], bad_words=["aaa"])
    deltas = list(llm.stream([[1]][0], params))
    assert "".join(delta.text for delta in deltas) == "aa"
    assert (deltas[-1].finish_reason, deltas[-1].error.code) == ("error", "no_allowed_token")
    assert_clean(llm)


def test_eos_is_streamed_as_a_token(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("Script", tokenizer=True, script=[120, EOS_ID, 120], scheduling__async_scheduling=ahead)
    deltas = list(llm.stream([0], GREEDY))
    assert tokens(deltas) == [120, EOS_ID]
    assert deltas[-1].finish_reason == "stop"
