"""A policy changes when a request runs, and never what it says."""

from __future__ import annotations

from typing import Any

import pytest
from deepinfer_scheduler.plugin import deepinfer_scheduling
from toys.checkpoints import ToyLLM
from toys.checks import assert_clean
from toys.oracle import HashOracle

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.engine.outputs import RequestOutput

POLICIES = [info.name for info in deepinfer_scheduling()]
ORACLE = HashOracle(64, [None])
TIGHT: dict[str, Any] = {
    "kv_cache__num_blocks": 14,
    "scheduling__max_batch_tokens": 12,
    "scheduling__max_running": 4,
    "plugins.scheduler.latency_min_chunk": 2,
}
PROMPTS = [[i % 5, *range(i % 3), *([i] * (3 * i % 17))] for i in range(24)]


def fields(number: int) -> dict[str, Any]:
    """Reasons for a policy to prefer one to another."""
    return {
        "prompt_token_ids": PROMPTS[number],
        "priority": number % 3,
        "tenant": "abc"[number * number % 3],
        **({"deadline_ms": 50 + 1000 * (number % 4)} if number % 2 else {}),
        **({"ttft_target_ms": 5 + number, "tpot_target_ms": 1 + number % 7} if number % 5 else {}),
    }


def params(number: int) -> SamplingParams:
    seeded = number % 2 == 1
    return SamplingParams(
        temperature=0.9 if seeded else 0,
        seed=number if seeded else None,
        max_tokens=3 + 5 * number % 19,
        ignore_eos=True,
        presence_penalty=0.5 if number % 3 == 0 else 0,
    )


def run(llm: LLM, gap: int = 2) -> list[RequestOutput]:
    """Requests that keep coming while others run."""
    core: Any = llm.engine.core
    requests = []
    for number in range(len(PROMPTS)):
        made = llm.engine.intake.request(str(number), fields(number), params(number), now=core.clock(), stream=False)
        requests.append(made)
        core.add([made])
        for _ in range(gap * (number % 3)):
            core.step()
    while core.has_unfinished:
        core.step()
    return [llm.output(request) for request in requests]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
@pytest.mark.parametrize("policy", POLICIES)
def test_same_tokens_greedy_and_seeded(toy_llm: ToyLLM, policy: str, ahead: bool) -> None:
    plain = toy_llm("PrefixHash")
    llm = toy_llm("PrefixHash", scheduling__policy=policy, scheduling__async_scheduling=ahead, **TIGHT)
    found = run(llm)
    assert tokens(found) == tokens(run(plain))
    if policy != "latency":  # which may be too slow at taking prompts, on a busy machine, for any to collide
        assert llm.engine.core.planner.preemption.count > 0
    assert llm.engine.core.planner.guard.failures == 0
    assert_clean(llm)


def test_the_greedy_ones_are_what_the_model_says(toy_llm: ToyLLM) -> None:
    llm = toy_llm("PrefixHash", scheduling__policy="fair", **TIGHT)
    found = tokens(run(llm))
    plain = [n for n in range(len(PROMPTS)) if n % 2 == 0 and n % 3]
    assert [found[n] for n in plain] == [ORACLE.tokens(PROMPTS[n], len(found[n])) for n in plain]


@pytest.mark.parametrize("policy", POLICIES)
def test_settings_are_typed_and_named(toy_llm: ToyLLM, policy: str) -> None:
    from deepinfer_core.api import ConfigError

    with pytest.raises(ConfigError, match=r"plugins.scheduler.patience_s = 'long' .*: expected a finite number"):
        toy_llm("PrefixHash", scheduling__policy=policy, **{"plugins.scheduler.patience_s": "long"})
    with pytest.raises(ConfigError, match=r"plugins.scheduler.patience_s = -1 .*: must be > 0"):
        toy_llm("PrefixHash", scheduling__policy=policy, **{"plugins.scheduler.patience_s": -1})


def test_policies_order_as_they_say_in_the_engine(toy_llm: ToyLLM) -> None:
    """Priorities, through the engine: the first one runs, then by class."""
    llm = toy_llm("PrefixHash", scheduling__policy="priority", scheduling__max_running=1)
    prompts = [{"prompt_token_ids": [i] * 4, "priority": p} for i, p in enumerate([0, 0, 2, 1, 2])]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=3))
    starts = [output.metrics.first_scheduled for output in outputs]
    assert sorted(range(5), key=lambda i: starts[i] or 0.0) == [2, 4, 3, 0, 1]


def test_deadline_refuses_in_the_engine(toy_llm: ToyLLM) -> None:
    llm = toy_llm("PrefixHash", scheduling__policy="deadline", **{"plugins.scheduler.deadline_refuse": True})
    late, fine = llm.generate(
        [{"prompt_token_ids": [1, 2], "deadline_ms": 1e-6}, {"prompt_token_ids": [1, 2], "deadline_ms": 1e6}],
        SamplingParams(temperature=0, max_tokens=3),
    )
    assert late.error is not None
    assert late.error.code == "rejected"
    assert "its prompt alone takes" in late.error.message
    assert fine.error is None
