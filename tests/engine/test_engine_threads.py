"""Several threads share one engine; a stream nobody reads stops no one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from toys.checkpoints import ToyLLM
from toys.checks import assert_clean, ids_of
from toys.oracle import HashOracle, count_tokens

from deepinfer_core import SamplingParams

HANG = 60.0
"""Seconds after which a thread that should have ended counts as stuck."""


def in_thread(act: Callable[[], Any]) -> Any:
    """What ``act`` returns, run in a thread of its own."""
    answer: list[Any] = []
    thread = threading.Thread(target=lambda: answer.append(act()), daemon=True)
    thread.start()
    thread.join(HANG)
    assert not thread.is_alive(), "stuck"
    assert answer, "raised"
    return answer[0]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_batch_beside_an_open_stream_of_another_thread(toy_llm: ToyLLM, ahead: bool) -> None:
    llm = toy_llm("Count", scheduling__async_scheduling=ahead)
    greedy = SamplingParams(temperature=0, max_tokens=20)
    stream = llm.stream([5], greedy)
    tokens = [token for _ in range(3) for token in next(stream).token_ids]
    assert ids_of(in_thread(lambda: llm.generate([[1], [2]], greedy))) == [count_tokens([i], 20, 64) for i in (1, 2)]
    tokens += [token for delta in stream for token in delta.token_ids]
    assert tokens == count_tokens([5], 20, 64)
    assert_clean(llm)


def test_a_stream_may_be_read_and_closed_by_any_thread(toy_llm: ToyLLM) -> None:
    llm = toy_llm("Count")
    stream = llm.stream([5], SamplingParams(temperature=0, max_tokens=20))
    assert [in_thread(lambda: next(stream)).token_ids for _ in range(3)] == [[6], [7], [8]]
    in_thread(stream.close)
    assert_clean(llm)
    assert ids_of(llm.generate([5], SamplingParams(temperature=0, max_tokens=2))) == [[6, 7]]


def test_many_threads(toy_llm: ToyLLM) -> None:
    llm = toy_llm("PrefixHash", kv_cache__num_blocks=12, scheduling__max_batch_tokens=9)
    oracle = HashOracle(64, [None])
    outputs: dict[int, list[list[int]]] = {}

    def work(number: int) -> None:
        prompts = [[number] * (1 + i) for i in range(4)]
        outputs[number] = ids_of(llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8)))

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    assert outputs == {n: [oracle.tokens([n] * (1 + i), 8) for i in range(4)] for n in range(6)}
    assert_clean(llm)
