"""A12 (vllm-project/vllm-metal#646) and A13 (vllm-project/vllm#3063) through the whole engine.

One batch mixes filters on and off and temperatures down to nothing; each request equals its own run.
"""

from __future__ import annotations

from typing import Any

import pytest
from toys.checkpoints import ToyLLM
from toys.checks import ids_of

from deepinfer_core import SamplingParams

MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"top_k": 0},
    {"top_k": -1},
    {"top_k": 4},
    {"top_k": 16},
    {"top_k": 10**6},
    {"top_p": 1e-9},
    {"min_p": 1.0},
    {"temperature": 1e-2, "top_k": 3},
    {"frequency_penalty": 1.5},
]
SMALL = [1e-2, 1e-4, 1e-5, 1e-6, 1e-12, 1e-38, 1e-45, 0]


@pytest.mark.parametrize("ahead", [False, True])
def test_each_request_of_a_mixed_batch_equals_its_own_run(toy_llm: ToyLLM, ahead: bool) -> None:
    llm = toy_llm("PrefixHash", vocab_size=16, scheduling__async_scheduling=ahead)
    params = [SamplingParams(**{"seed": 5, "max_tokens": 10} | row) for row in MIXED]
    together = ids_of(llm.generate([[3]] * len(params), params))
    assert together == [ids_of(llm.generate([3], one))[0] for one in params]
    assert together[1] == together[2] == together[4] == together[5]
    assert together[0] == together[6] == together[7]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("temperature", SMALL)
def test_small_temperatures_take_the_best_token(toy_llm: ToyLLM, ahead: bool, temperature: float) -> None:
    llm = toy_llm("Const", vocab_size=3, logits={"0": 1.0, "1": 7.5, "2": 3.0}, scheduling__async_scheduling=ahead)
    normal = SamplingParams(seed=3, max_tokens=8, logprobs=0)
    alone = llm.generate([0], normal)[0].outputs
    params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=8) for seed in range(5)]
    *cold, beside = llm.generate([[0]] * 6, [*params, normal])
    assert ids_of(cold) == [[1] * 8] * 5
    assert beside.outputs == alone
