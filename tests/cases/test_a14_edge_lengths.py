"""A14 (vllm-project/vllm#7632): requests at the edge of what is legal, while another one streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
from toys.checkpoints import ToyLLM
from toys.checks import assert_clean
from toys.oracle import count_tokens

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.api import InvalidRequestError


@attrs.define
class Streaming:
    """An engine of ``max_model_len`` 32 with a COUNT stream half way."""

    llm: LLM
    stream: Iterator[Any]
    tokens: list[int]

    def finish(self) -> None:
        self.tokens += [token for delta in self.stream for token in delta.token_ids]
        assert self.tokens == count_tokens([9], 25, 320)
        assert_clean(self.llm)


@pytest.fixture(params=[False, True], ids=["sync", "ahead"])
def streaming(request: pytest.FixtureRequest, toy_llm: ToyLLM) -> Iterator[Streaming]:
    llm = toy_llm("Count", tokenizer=True, max_len=32, scheduling__async_scheduling=request.param)
    stream = llm.stream([9], SamplingParams(temperature=0, max_tokens=25))
    state = Streaming(llm, stream, [token for _ in range(3) for token in next(stream).token_ids])
    yield state
    state.finish()


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 4} | params)


@pytest.mark.parametrize("prompt", ["", [[]], [1] * 32, [1] * 33, [1] * 10_000])
def test_refused_prompts(streaming: Streaming, prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        streaming.llm.generate(prompt, greedy())


def test_one_token_below_the_limit(streaming: Streaming) -> None:
    (output,) = streaming.llm.generate([1] * 31, greedy())
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([2], "length")


@pytest.mark.parametrize("max_tokens", [0, -1])
@pytest.mark.parametrize("more", [{}, {"logprobs": 1, "prompt_logprobs": 1}])
def test_no_tokens_asked(streaming: Streaming, max_tokens: int, more: dict[str, int]) -> None:
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        greedy(max_tokens=max_tokens, **more)


def test_one_token_asked(streaming: Streaming) -> None:
    deltas = list(streaming.llm.stream([1], greedy(max_tokens=1)))
    assert [token for delta in deltas for token in delta.token_ids] == [2]
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]


@pytest.mark.parametrize("n", [0, 17, 10**9, 2**63 - 1, 2**64])
def test_bad_counts(streaming: Streaming, n: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"n={n}"):
        streaming.llm.generate([1], greedy(n=n))


def test_more_blocks_than_the_pool_owns(toy_llm: ToyLLM) -> None:
    llm = toy_llm("Count", kv_cache__num_blocks=7)
    stream = llm.stream([9], greedy(max_tokens=20))
    tokens = [token for _ in range(3) for token in next(stream).token_ids]
    with pytest.raises(InvalidRequestError, match="num_blocks"):
        llm.generate([1] * 40, greedy())
    assert tokens + [token for delta in stream for token in delta.token_ids] == count_tokens([9], 20, 64)
    assert_clean(llm)
