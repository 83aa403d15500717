"""Drafts and the cache: rows that were rejected, blocks, windows, prefix hits, budgets and preemption."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from toys.checkpoints import ToyLLM
from toys.checks import assert_clean, ids_of
from toys.drafters import check_drafter, drafter_of, drafting
from toys.oracle import HashOracle

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.api import TokenSplit
from deepinfer_core.engine.planner import StepPlan

PROMPTS = [[i] * (i + 1) for i in range(6)]


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


def watch_plans(llm: LLM, plans: list[StepPlan]) -> None:
    """Collect every plan of an engine."""
    inner = llm.engine.core.planner.plan

    def plan(drafts: Any = None) -> StepPlan | None:
        made = inner(drafts)
        if made is not None:
            plans.append(made)
        return made

    llm.engine.core.planner.plan = plan  # type: ignore[method-assign]


# ---- windows


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("right", [0, 1, 4, 7, 8])
def test_windows_narrower_than_the_drafts(toy_llm: ToyLLM, window: int, right: int) -> None:
    """Rejected rows lie past the window's end: it slides by what was accepted, not by what was run."""
    groups = {"near": window, "full": None}
    settings = drafting("toy", knows="hash", windows=(window, 0), depth=8, right=right)
    llm = toy_llm("PrefixHash", groups=groups, **settings)
    oracle = HashOracle(64, [window, None])
    assert ids_of(llm.generate(PROMPTS, greedy(30))) == [oracle.tokens(prompt, 30) for prompt in PROMPTS]
    assert {v.accepted for v in drafter_of(llm).heard if v.proposed == 8} == {right}
    assert_clean(llm)


@pytest.mark.parametrize("num_blocks", [4, 5, 6, 8])
def test_a_window_alone_in_a_tiny_pool(toy_llm: ToyLLM, num_blocks: int) -> None:
    """The pool holds hardly more than a window: drafts shrink to what fits."""
    settings = drafting("excessive", knows="hash", windows=(6,), right=5)
    llm = toy_llm("PrefixHash", groups={"near": 6}, kv_cache__num_blocks=num_blocks, **settings)
    oracle = HashOracle(64, [6])
    assert ids_of(llm.generate(PROMPTS, greedy(30))) == [oracle.tokens(prompt, 30) for prompt in PROMPTS]
    assert_clean(llm)


# ---- prefix hits


@pytest.mark.parametrize("groups", [{"full": None}, {"near": 6}, {"full": None, "near": 5}])
@pytest.mark.parametrize("method", ["toy", "varying"])
@pytest.mark.parametrize("right", [0, 2, 99])
def test_hits_on_what_was_speculated(toy_llm: ToyLLM, groups: dict[str, int | None], method: str, right: int) -> None:
    """Blocks filled with drafts in them hold the accepted tokens; a longer request on the same text equals cold."""
    windows = tuple(window or 0 for window in groups.values())
    settings = drafting(method, knows="hash", windows=windows, depth=7, right=right)
    llm = toy_llm("PrefixHash", groups=groups, **settings)
    oracle = HashOracle(64, list(groups.values()))
    for length in range(1, 10):
        prompt = list(range(length))
        text = prompt + oracle.tokens(prompt, 30)
        assert ids_of(llm.generate([prompt], greedy(20))) == [text[length : length + 20]]
        cached = []
        for cut in range(length + 12, length + 20):
            for last in (text[cut], (text[cut] + 1) % 64):
                shared = [*text[:cut], last]
                (output,) = llm.generate([shared], greedy(6))
                assert output.outputs[0].token_ids == oracle.tokens(shared, 6)
                cached.append(output.metrics.cached_tokens)
        assert max(cached) >= length + 12
    assert_clean(llm)


def test_rejected_tokens_are_no_hits(toy_llm: ToyLLM) -> None:
    """A prompt that spells the rejected drafts finds only what came before them."""
    llm = toy_llm("PrefixHash", **drafting("toy", knows="hash", depth=8, right=0))
    oracle, drafter = HashOracle(64, [None]), drafter_of(llm)
    spelled: list[tuple[int, list[int]]] = []
    inner = drafter.tokens

    def tokens(row: Any) -> Any:
        draft = inner(row)
        spelled.append((len(row.tokens), [*row.tokens.tolist(), *draft, 1]))
        return draft

    drafter.tokens = tokens  # type: ignore[method-assign]
    llm.generate([[1, 2, 3]], greedy(20))
    drafter.tokens = lambda row: []  # type: ignore[method-assign]
    assert len(spelled) == 18
    for known, prompt in spelled:
        (output,) = llm.generate([prompt], greedy(3))
        assert output.outputs[0].token_ids == oracle.tokens(prompt, 3)
        assert known - 4 <= output.metrics.cached_tokens <= known


@pytest.mark.parametrize("length", [4, 8, 12])
def test_drafts_right_after_a_full_hit(toy_llm: ToyLLM, length: int) -> None:
    """The recomputed token's row is shared and left alone; the rows of drafts after it are not."""
    llm = toy_llm("PrefixHash", **drafting("toy", knows="hash", depth=6, right=3))
    prompt, oracle = list(range(length)), HashOracle(64, [None])
    for _ in range(3):
        outputs = llm.generate([prompt] * 3, greedy(15))
        assert ids_of(outputs) == [oracle.tokens(prompt, 15)] * 3
    assert outputs[0].metrics.cached_tokens == length - 1
    assert_clean(llm)


# ---- budgets


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8, 13])
def test_a_step_smaller_than_the_drafts(toy_llm: ToyLLM, budget: int) -> None:
    llm = toy_llm("PrefixHash", scheduling__max_batch_tokens=budget, **drafting("toy", knows="hash", depth=8))
    plans: list[StepPlan] = []
    watch_plans(llm, plans)
    oracle = HashOracle(64, [None])
    assert ids_of(llm.generate(PROMPTS, greedy(12))) == [oracle.tokens(prompt, 12) for prompt in PROMPTS]
    assert max(plan.num_tokens for plan in plans) <= budget
    assert any(plan.drafts for plan in plans) == (budget > 1)
    assert_clean(llm)


def test_drafts_count_as_decode_tokens(toy_llm: ToyLLM) -> None:
    """A policy that grants decoding 5 tokens a step while others wait gets no more, drafts included."""
    llm = toy_llm("PrefixHash", scheduling__max_batch_tokens=16, **drafting("toy", knows="hash", depth=8))
    plans: list[StepPlan] = []
    watch_plans(llm, plans)
    llm.engine.core.planner.policy.split = lambda view: TokenSplit(5, 3)  # type: ignore[method-assign]
    prompts, oracle = [[1] * 3, [2] * 30, [3] * 30], HashOracle(64, [None])
    assert ids_of(llm.generate(prompts, greedy(12))) == [oracle.tokens(prompt, 12) for prompt in prompts]
    mixed = [plan for plan in plans if plan.drafts and (plan.counts != plan.samples).any()]
    assert mixed
    for plan in mixed:
        assert int(plan.samples.sum()) <= 5 + int((plan.samples[len(plan.drafts) :] > 0).sum())


def test_the_last_prompt_row_may_have_drafts(toy_llm: ToyLLM) -> None:
    """A chunk that leaves one prompt row makes that row a decode row; its drafts and log-probabilities are right."""
    llm = toy_llm("PrefixHash", scheduling__max_batch_tokens=8, **drafting("toy", knows="hash", depth=6, right=4))
    plain = toy_llm("PrefixHash", scheduling__max_batch_tokens=8)
    params = greedy(12, logprobs=2, prompt_logprobs=2)
    prompt = list(range(9))
    (output,), (expected,) = llm.generate([prompt], params), plain.generate([prompt], params)
    assert output.outputs == expected.outputs
    assert output.prompt_logprobs == expected.prompt_logprobs
    assert drafter_of(llm).shown[0] == (("0", 0), 9)
    check_drafter(llm)


# ---- preemption


@pytest.mark.parametrize("groups", [{"full": None}, {"full": None, "near": 5}])
@pytest.mark.parametrize("num_blocks", [8, 9, 12])
@pytest.mark.parametrize("right", [0, 3, 99])
def test_tiny_pools(toy_llm: ToyLLM, groups: dict[str, int | None], num_blocks: int, right: int) -> None:
    windows = tuple(window or 0 for window in groups.values())
    settings = drafting("toy", knows="hash", windows=windows, depth=6, right=right)
    llm = toy_llm("PrefixHash", groups=groups, kv_cache__num_blocks=num_blocks, **settings)
    oracle = HashOracle(64, list(groups.values()))
    outputs = llm.generate(PROMPTS, greedy(20))
    assert ids_of(outputs) == [oracle.tokens(prompt, 20) for prompt in PROMPTS]
    assert sum(output.metrics.preemptions for output in outputs) > 0
    assert [output.metrics.output_tokens for output in outputs] == [20] * 6
    check_drafter(llm)
    assert_clean(llm)


@pytest.mark.parametrize("right", [0, 2, 99])
def test_blocks_of_rejected_drafts_are_given_back(toy_llm: ToyLLM, right: int) -> None:
    """After each step a request owns what its own tokens fill."""
    llm = toy_llm("PrefixHash", **drafting("toy", knows="hash", depth=8, right=right), kv_cache__prefix_cache=False)
    core, slots = llm.engine.core, llm.engine.core.planner.slots
    requests = [llm.engine.intake.request(str(i), p, greedy(25), now=0.0, stream=False) for i, p in enumerate(PROMPTS)]
    core.add(requests)
    while core.has_unfinished:
        core.step()
        cache = core.planner.cache
        owned = sum(cache.blocks_for(int(slots.computed[slot])) for slot in slots.running.tolist())
        assert cache.total_blocks - cache.free_blocks == owned


def test_drafts_preempt_nobody_in_their_step(toy_llm: ToyLLM) -> None:
    """Whoever is preempted makes room for tokens that are due; drafts take free blocks, or none."""
    rng = random.Random(4)
    llm = toy_llm("PrefixHash", kv_cache__num_blocks=9, **drafting("toy", knows="hash", right=1))
    planner = llm.engine.core.planner
    inner = planner._fitting_drafts
    free: list[int] = []

    def fitting(decodes: Any, drafts: Any, budget: int) -> Any:
        before, preempted = planner.slots.running.copy(), planner.preemption.count
        fitted = inner(decodes, drafts, budget)
        assert planner.preemption.count == preempted
        assert np.array_equal(planner.slots.running, before)
        assert fitted.keys() <= set(decodes.tolist())
        free.append(planner.cache.free_blocks)
        return fitted

    planner._fitting_drafts = fitting  # type: ignore[method-assign]
    prompts = [[rng.randrange(64) for _ in range(rng.randrange(1, 9))] for _ in range(9)]
    outputs = llm.generate(prompts, greedy(18))
    assert ids_of(outputs) == [HashOracle(64, [None]).tokens(prompt, 18) for prompt in prompts]
    assert min(free) == 0
    assert planner.preemption.count > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_preemption_changes_no_penalised_token(toy_llm: ToyLLM, temperature: float) -> None:
    """Presence counts the tokens that were produced, before and after being replayed, and never a draft."""
    llm = toy_llm("PrefixHash", kv_cache__num_blocks=9, **drafting("varying", knows="hash"))
    oracle = HashOracle(64, [None])
    params = SamplingParams(temperature=temperature, seed=5, presence_penalty=1.5, max_tokens=20)
    expected = [oracle.tokens(p, 20, temperature=temperature, seed=5, presence=1.5) for p in PROMPTS]
    outputs = llm.generate(PROMPTS, params)
    assert ids_of(outputs) == expected
    assert sum(output.metrics.preemptions for output in outputs) > 0
    assert_clean(llm)
