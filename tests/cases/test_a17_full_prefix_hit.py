"""A17 (GeeeekExplorer/nano-vllm#144): a prompt that is cached as a whole still computes one token, and harms nobody."""

from __future__ import annotations

from typing import Any

import pytest
from toys.checkpoints import ToyLLM
from toys.checks import assert_clean, ids_of
from toys.oracle import HashOracle, log_softmax

from deepinfer_core import LLM, SamplingParams

PROMPTS = {length: [(5 * i + 1) % 64 for i in range(length)] for length in (1, 3, 4, 5, 7, 8, 9, 12, 16)}
GROUPS: list[dict[str, int | None]] = [{"full": None}, {"full": None, "near": 5}, {"near": 9}]


@pytest.fixture(params=[(g, a) for g in GROUPS for a in (False, True)], ids=lambda p: f"{'+'.join(p[0])}-{p[1]}")
def engine(request: pytest.FixtureRequest, toy_llm: ToyLLM) -> tuple[LLM, HashOracle]:
    groups, ahead = request.param
    return toy_llm("PrefixHash", groups=groups, scheduling__async_scheduling=ahead), HashOracle(
        64, list(groups.values())
    )


@pytest.mark.parametrize("max_tokens", [1, 5])
@pytest.mark.parametrize("length", PROMPTS)
def test_again_and_again(engine: tuple[LLM, HashOracle], length: int, max_tokens: int) -> None:
    llm, oracle = engine
    prompt, params = PROMPTS[length], SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=0)
    expected = oracle.tokens(prompt, max_tokens)
    for _ in range(3):
        (output,) = llm.generate(prompt, params)
        assert output.outputs[0].token_ids == expected
        assert output.metrics.cached_tokens <= length - 1
        assert output.outputs[0].logprobs is not None
        (value,) = output.outputs[0].logprobs[0].values()
        assert value.logprob == pytest.approx(log_softmax(oracle.logits(prompt))[expected[0]], abs=1e-5)
    assert_clean(llm)


@pytest.mark.parametrize("length", [8, 9])
def test_twice_in_one_step(engine: tuple[LLM, HashOracle], length: int) -> None:
    llm, oracle = engine
    prompt, params = PROMPTS[length], SamplingParams(temperature=0, max_tokens=5)
    for _ in range(2):
        assert ids_of(llm.generate([prompt, prompt], params)) == [oracle.tokens(prompt, 5)] * 2
    assert_clean(llm)


def test_third_request_on_the_prefix(engine: tuple[LLM, HashOracle]) -> None:
    llm, oracle = engine
    params = SamplingParams(temperature=0, max_tokens=5)
    for prompt in (PROMPTS[8], PROMPTS[8], [*PROMPTS[8], 40, 41], PROMPTS[8][:4], PROMPTS[8]):
        assert ids_of(llm.generate(prompt, params)) == [oracle.tokens(prompt, 5)]
    assert_clean(llm)


def test_rows_of_a_full_hit(toy_llm: ToyLLM) -> None:
    llm: Any = toy_llm("PrefixHash")
    params = SamplingParams(temperature=0, max_tokens=1)
    llm.generate(PROMPTS[8], params)
    rows: list[list[int]] = []
    llm.engine.model.before = lambda batch: rows.append(batch.positions.tolist())
    llm.generate(PROMPTS[8], params)
    assert rows == [[7]]
