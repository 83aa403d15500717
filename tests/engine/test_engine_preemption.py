"""Preemption by recompute: it happens, it changes nothing, and it ends."""

from __future__ import annotations

from typing import Any

import pytest
from toys.checks import assert_clean, facts, ids_of
from toys.oracle import HashOracle

from deepinfer_core import SamplingParams

ORACLE = HashOracle(64, [None])
PROMPTS = [[(13 * i + j) % 64 for j in range(4 + i)] for i in range(4)]
TINY: dict[str, Any] = {"kv_cache__num_blocks": 8, "scheduling__max_batch_tokens": 6}


@pytest.fixture(params=[False, True], ids=["sync", "ahead"])
def ahead(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 11, "temperature": 0.9},
    "penalties": {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "logprobs": {"seed": 5, "logprobs": 2},
    "prompt_logprobs": {"temperature": 0, "prompt_logprobs": 1},
    "filters": {"seed": 5, "top_k": 7, "min_p": 0.01, "top_p": 0.95, "logit_bias": {3: 1.0}},
    "stops": {"temperature": 0, "stop_token_ids": [1, 17, 33], "min_tokens": 6},
    "several": {"seed": 3, "n": 3},
}


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["cold", "cached"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_results_are_those_of_an_ample_pool(toy_llm: Any, ahead: bool, variant: str, prefix_cache: bool) -> None:
    params = SamplingParams(**{"max_tokens": 15} | VARIANTS[variant])
    ample = toy_llm("PrefixHash", kv_cache__prefix_cache=prefix_cache)
    tiny = toy_llm("PrefixHash", kv_cache__prefix_cache=prefix_cache, scheduling__async_scheduling=ahead, **TINY)
    wanted, got = (llm.generate(PROMPTS, params) for llm in (ample, tiny))
    assert tiny.engine.core.planner.preemption.count > 0
    assert [facts(output) for output in got] == [facts(output) for output in wanted]
    assert sum(output.metrics.preemptions for output in got) == tiny.engine.core.planner.preemption.count
    assert_clean(tiny)


@pytest.mark.parametrize("groups", [{"near": 6}, {"full": None, "near": 6}], ids=lambda g: "+".join(g))
@pytest.mark.parametrize("prefix_cache", [False, True], ids=["cold", "cached"])
def test_window_groups(toy_llm: Any, ahead: bool, groups: dict[str, Any], prefix_cache: bool) -> None:
    oracle = HashOracle(64, list(groups.values()))
    llm = toy_llm(
        "PrefixHash",
        groups=groups,
        kv_cache__prefix_cache=prefix_cache,
        scheduling__async_scheduling=ahead,
        **TINY | ({"kv_cache__num_blocks": 6} if len(groups) == 1 else {}),
    )
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=15))
    assert ids_of(outputs) == [oracle.tokens(p, 15) for p in PROMPTS]
    assert_clean(llm)


def test_without_chunked_prefill_a_replay_may_be_longer_than_a_step(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm(
        "PrefixHash",
        kv_cache__num_blocks=8,
        kv_cache__prefix_cache=False,
        scheduling__max_batch_tokens=8,
        scheduling__chunked_prefill=False,
        scheduling__async_scheduling=ahead,
    )
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=15))
    assert llm.engine.core.planner.preemption.count > 0
    assert ids_of(outputs) == [ORACLE.tokens(p, 15) for p in PROMPTS]
    assert_clean(llm)


def test_the_newest_is_preempted_and_the_oldest_never(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("PrefixHash", kv_cache__prefix_cache=False, scheduling__async_scheduling=ahead, **TINY)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=15))
    assert outputs[0].metrics.preemptions == 0
    assert outputs[3].metrics.preemptions > 0


def test_as_large_as_the_pool_runs_alone(toy_llm: Any, ahead: bool) -> None:
    """Each needs all seven blocks at its end."""
    llm = toy_llm("PrefixHash", scheduling__async_scheduling=ahead, **TINY)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=100))
    assert ids_of(outputs) == [ORACLE.tokens(p, 28 - len(p)) for p in PROMPTS]
    assert_clean(llm)


def test_the_cache_shortens_the_replay(toy_llm: Any) -> None:
    rows = {}
    for prefix_cache in (False, True):
        llm = toy_llm("PrefixHash", kv_cache__prefix_cache=prefix_cache, **TINY)
        seen: list[int] = []
        llm.engine.model.before = lambda batch, seen=seen: seen.append(len(batch.positions))
        llm.generate([[*range(8), i] for i in range(4)], SamplingParams(temperature=0, max_tokens=13))
        assert llm.engine.core.planner.preemption.count > 0
        rows[prefix_cache] = sum(seen)
    assert rows[True] < rows[False]


def test_abort_of_a_preempted_request(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("PrefixHash", scheduling__async_scheduling=ahead, **TINY)
    core, intake = llm.engine.core, llm.engine.intake
    params = SamplingParams(temperature=0, max_tokens=15)
    requests = [intake.request(str(i), p, params, now=0.0, stream=False) for i, p in enumerate(PROMPTS)]
    core.add(requests)
    while not core.planner.preemption.count:
        core.step()
    victim = next(r for r in requests if r.metrics.preemptions)
    core.abort([victim.request_id])
    while core.has_unfinished:
        core.step()
    for request, prompt in zip(requests, PROMPTS, strict=True):
        ids = llm.output(request).outputs[0].token_ids
        whole = ORACLE.tokens(prompt, 15)
        assert ids == (whole[: len(ids)] if request is victim else whole)
    assert_clean(llm)
