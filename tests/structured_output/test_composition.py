"""A grammar beside everything else: drafters on the host and on the device, the loop one step ahead, penalties, several
completions, preemption. The tokens are those of the plain engine, and always valid."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from grammar_engines import constrained, grammar_llm
from toys.checkpoints import ToyLLM
from toys.checks import assert_clean, facts
from toys.device_drafters import TEXTS

from deepinfer_core import LLM, RequestOutput, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 9999}, "kind": {"enum": ["ab", "the foo", "z"]}},
    "required": ["id", "kind"],
    "additionalProperties": False,
}
PROMPTS = [[i, 2 * i, 7] for i in range(9)]


def params() -> list[SamplingParams]:
    common: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.5, "n": 2},
        {"temperature": 0, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
        {"temperature": 0.8, "presence_penalty": -0.5, "logprobs": 2},
    ]
    forms: list[dict[str, Any]] = [
        {"json": SCHEMA},
        {"regex": "(ab|foo )[a-f]{3}-[0-9]{2,4}"},
        {"ebnf": 'root ::= "<" [a-c]+ ">" | "[" root "]"'},
    ]
    made = [constrained(40, seed=i, **forms[i % 3], **common[i % 4]) for i in range(8)]
    return [*made, SamplingParams(max_tokens=12, seed=9)]


def check(outputs: Sequence[RequestOutput]) -> None:
    for index, output in enumerate(outputs[:8]):
        assert output.error is None
        for completion in output.outputs:
            if completion.finish_reason != "stop":
                assert index % 3 == 2  # the nested grammar may go on
            elif index % 3 == 0:
                assert set(json.loads(completion.text)) == {"id", "kind"}
            elif index % 3 == 1:
                assert re.fullmatch("(ab|foo )[a-f]{3}-[0-9]{2,4}", completion.text)
            else:
                assert re.fullmatch(r"\[*<[abc]+>\]*", completion.text)


@pytest.fixture
def plain(toy_llm: ToyLLM) -> list[RequestOutput]:
    outputs = grammar_llm(toy_llm, kind="PrefixHash", structured_outputs__jump_forward=0).generate(PROMPTS, params())
    check(outputs)
    return outputs


def same(llm: LLM, plain: Sequence[RequestOutput]) -> list[RequestOutput]:
    outputs = llm.generate(PROMPTS, params())
    assert [facts(output) for output in outputs] == [facts(output) for output in plain]
    assert_clean(llm)
    return outputs


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
def test_jumping_forward_and_running_ahead(toy_llm: ToyLLM, plain: list[RequestOutput], ahead: bool) -> None:
    outputs = same(grammar_llm(toy_llm, kind="PrefixHash", scheduling__async_scheduling=ahead), plain)
    assert sum(output.metrics.forced_tokens for output in outputs) > 40


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
def test_preemption(toy_llm: ToyLLM, plain: list[RequestOutput], ahead: bool) -> None:
    settings = {"kv_cache__num_blocks": 14, "scheduling__async_scheduling": ahead}
    outputs = same(grammar_llm(toy_llm, kind="PrefixHash", **settings), plain)
    assert sum(output.metrics.preemptions for output in outputs) > 0


@pytest.mark.parametrize("drafter", ["toy", "varying", "early", "outside", "excessive", "raising", "garbage"])
def test_host_drafters(toy_llm: ToyLLM, plain: list[RequestOutput], drafter: str) -> None:
    settings = {
        "plugins__paths": ["toys.plugin", "toys.drafter_plugin"],
        "speculation__method": drafter,
        "speculation__max_draft_tokens": 4,
        "plugins__drafter_plugin": {"knows": "hash", "vocab": 320},
    }
    same(grammar_llm(toy_llm, kind="PrefixHash", **settings), plain)


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
@pytest.mark.parametrize("right", [-1, 0, 2, 9])
def test_a_device_drafter(toy_llm: ToyLLM, plain: list[RequestOutput], right: int, ahead: bool) -> None:
    TEXTS.clear()
    TEXTS.extend([*o.prompt_token_ids, *c.token_ids] for o in plain for c in o.outputs)
    settings = {
        "plugins__paths": ["toys.plugin", "toys.device_drafters"],
        "speculation__method": "told",
        "speculation__max_draft_tokens": 5,
        "scheduling__async_scheduling": ahead,
        "plugins__device_drafters": {"right": right, "vocab": 256},
    }
    llm = grammar_llm(toy_llm, kind="PrefixHash", **settings)
    outputs = same(llm, plain)
    assert llm.engine.core.speculator is not None
    assert llm.engine.core.speculator.failures == 0
    if right == 9:
        assert sum(output.metrics.accepted_drafts for output in outputs) > 40
