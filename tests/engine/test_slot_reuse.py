"""A request gets what it asked for, whoever had its slot before and whoever is sampled beside it.

Every stage runs for all rows as soon as one row needs it, over tables in which the slots keep what they were given.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from toys.checkpoints import ToyLLM
from toys.checks import assert_clean, facts

from deepinfer_core import LLM, SamplingParams

PROMPT = [3, 4, 5, 3]
GREEDY = {"temperature": 0}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": GREEDY,
    "greedy with filters": GREEDY | {"top_k": 2, "top_p": 0.3, "min_p": 0.5},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.4},
    "min_p": {"min_p": 0.3},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": -2.0},
    "repetition": {"repetition_penalty": 5.0},
    "bias": {"logit_bias": dict.fromkeys(range(0, 260, 7), 20.0)},
    "allowed": {"allowed_token_ids": [*range(40, 60)]},
    "bad words": {"bad_words": [chr(c) for c in range(32, 127)]},
    "long bad word": {"bad_words": ["abcdefgh"]},
    "min_tokens": {"min_tokens": 6},
    "stop ids": {"stop_token_ids": [*range(0, 200, 3)]},
    "stop string": {"stop": ["a", "b", "c", "d", "e"]},
    "kept eos": {"ignore_eos": True},
    "other child": {"n": 2},
    "prompt": {"prompt_logprobs": 2},
}
"""Each leaves something in its slot, or activates a stage, that another must not see."""


def params(kind: str, seed: int = 5) -> SamplingParams:
    """All report the distribution they were drawn from, so that a filter left on shows at once."""
    shown = {"seed": seed, "max_tokens": 6, "logprobs": 3, "logprobs_mode": "processed"}
    return SamplingParams(**shown | KINDS[kind])


@pytest.fixture(params=[False, True], ids=["sync", "ahead"])
def llm(request: pytest.FixtureRequest, toy_llm: ToyLLM) -> LLM:
    return toy_llm("PrefixHash", vocab_size=320, tokenizer=True, scheduling__async_scheduling=request.param)


@pytest.fixture
def alone(toy_llm: ToyLLM) -> dict[str, Any]:
    """What each kind gives in an engine that nobody used before."""
    return {
        kind: facts(toy_llm("PrefixHash", vocab_size=320, tokenizer=True).generate([PROMPT], params(kind))[0])
        for kind in KINDS
    }


EVERYTHING = SamplingParams(
    seed=1, max_tokens=6, temperature=0.5, top_k=9, top_p=0.9, min_p=0.01, presence_penalty=0.1,
    logit_bias={9: 1.0}, allowed_token_ids=[*range(250)], bad_words=["zz"], min_tokens=6,
)  # fmt: skip
"""Its row needs every stage."""


def test_kinds_differ(alone: dict[str, Any]) -> None:
    """Else the other tests would show nothing."""
    quiet = {"stop ids", "stop string", "long bad word", "kept eos", "min_tokens", "greedy with filters"}
    for one, other in itertools.combinations(KINDS.keys() - quiet, 2):
        assert alone[one] != alone[other], (one, other)


def test_any_after_any_other(llm: LLM, alone: dict[str, Any]) -> None:
    """One slot after another kind's use of it, beside a neighbour that activates all stages."""
    for first, second in random.sample([*itertools.product(KINDS, KINDS)], 120):
        llm.generate([PROMPT], params(first))
        found, _ = llm.generate([PROMPT, [9]], [params(second), EVERYTHING])
        assert facts(found) == alone[second], (first, second)
    assert_clean(llm)


def test_all_at_once_in_any_order(llm: LLM, alone: dict[str, Any]) -> None:
    for _ in range(6):
        kinds = random.sample(list(KINDS), 12)
        for kind, found in zip(kinds, llm.generate([PROMPT] * 12, [params(kind) for kind in kinds]), strict=True):
            assert facts(found) == alone[kind], (kind, kinds)
    assert_clean(llm)
