"""Same seed, same tokens: at any batch position, chunking, arrival; and the draws follow the published rule."""

from __future__ import annotations

from typing import Any

import pytest
from toys.checks import assert_clean, ids_of
from toys.oracle import HashOracle

from deepinfer_core import SamplingParams

PROMPT = [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12, 13]
ORACLE = HashOracle(64, [None])


@pytest.fixture(params=[False, True], ids=["sync", "ahead"])
def ahead(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def seeded(seed: int = 42, **options: Any) -> SamplingParams:
    return SamplingParams(**{"seed": seed, "temperature": 0.8, "max_tokens": 12} | options)


@pytest.mark.parametrize("seed", [0, 42, 2**32, 2**63 - 1, 2**64 - 1, -3])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_tokens_follow_the_published_rule(toy_llm: Any, seed: int, temperature: float) -> None:
    outputs = toy_llm("PrefixHash").generate(PROMPT, seeded(seed, temperature=temperature))
    assert ids_of(outputs) == [ORACLE.tokens(PROMPT, 12, temperature=temperature, seed=seed)]


@pytest.mark.parametrize("row", [0, 1, 7])
def test_position_in_the_batch(toy_llm: Any, ahead: bool, row: int) -> None:
    llm = toy_llm("PrefixHash", scheduling__async_scheduling=ahead)
    prompts, params = [[i, i + 1] for i in range(8)], [SamplingParams(max_tokens=9 + i) for i in range(8)]
    prompts[row], params[row] = PROMPT, seeded()
    assert ids_of(llm.generate(prompts, params))[row] == ORACLE.tokens(PROMPT, 12, temperature=0.8, seed=42)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 12, 13])
def test_chunking(toy_llm: Any, ahead: bool, chunk: int) -> None:
    llm = toy_llm("PrefixHash", scheduling__async_scheduling=ahead, scheduling__max_batch_tokens=chunk)
    assert ids_of(llm.generate(PROMPT, seeded())) == [ORACLE.tokens(PROMPT, 12, temperature=0.8, seed=42)]


def test_arrival_while_others_decode(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("PrefixHash", scheduling__async_scheduling=ahead)
    stream = llm.stream([1, 2], SamplingParams(max_tokens=30, seed=5, ignore_eos=True))
    before = [next(stream) for _ in range(4)]
    assert ids_of(llm.generate(PROMPT, seeded())) == [ORACLE.tokens(PROMPT, 12, temperature=0.8, seed=42)]
    tokens = [token for delta in [*before, *stream] for token in delta.token_ids]
    assert tokens == ORACLE.tokens([1, 2], 30, temperature=1.0, seed=5)
    assert_clean(llm)


def test_repeats_give_the_same(toy_llm: Any) -> None:
    llm = toy_llm("PrefixHash")
    assert len({tuple(ids_of(llm.generate(PROMPT, seeded()))[0]) for _ in range(5)}) == 1


def test_other_seeds_give_others(toy_llm: Any) -> None:
    outputs = toy_llm("Flat").generate([[1]] * 6, [seeded(seed) for seed in range(6)])
    assert len({tuple(ids) for ids in ids_of(outputs)}) == 6


def test_without_a_seed_requests_differ(toy_llm: Any) -> None:
    outputs = toy_llm("Flat").generate([[1]] * 6, SamplingParams(max_tokens=12))
    assert len({tuple(ids) for ids in ids_of(outputs)}) == 6


# ---- several completions


@pytest.mark.parametrize("seed", [7, 2**63 - 1, 2**64 - 1])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_children_follow_the_published_rule(toy_llm: Any, ahead: bool, seed: int, prefix_cache: bool) -> None:
    llm = toy_llm("PrefixHash", scheduling__async_scheduling=ahead, kv_cache__prefix_cache=prefix_cache)
    (output,) = llm.generate(PROMPT, seeded(seed, n=4))
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    for child, completion in enumerate(output.outputs):
        assert completion.token_ids == ORACLE.tokens(PROMPT, 12, temperature=0.8, seed=seed, child=child)
    assert_clean(llm)


def test_child_0_is_the_only_child(toy_llm: Any) -> None:
    llm = toy_llm("Flat")
    alone, several = (llm.generate([3], seeded(n=n))[0].outputs for n in (1, 3))
    assert several[0] == alone[0]
    assert len({tuple(c.token_ids) for c in several}) == 3


def test_greedy_children_are_equal(toy_llm: Any) -> None:
    (output,) = toy_llm("PrefixHash").generate(PROMPT, SamplingParams(temperature=0, n=3, max_tokens=5))
    assert [c.token_ids for c in output.outputs] == [ORACLE.tokens(PROMPT, 5)] * 3


def test_as_many_children_as_run_at_once(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("PrefixHash", scheduling__async_scheduling=ahead, scheduling__max_running=4)
    outputs = llm.generate([PROMPT, [1], [2]], seeded(n=4))
    for prompt, output in zip([PROMPT, [1], [2]], outputs, strict=True):
        for child, completion in enumerate(output.outputs):
            assert completion.token_ids == ORACLE.tokens(prompt, 12, temperature=0.8, seed=42, child=child)
    assert_clean(llm)


def test_children_share_their_prompt(toy_llm: Any) -> None:
    llm = toy_llm("PrefixHash")
    rows: list[int] = []
    llm.engine.model.before = lambda batch: rows.append(len(batch.positions))
    llm.generate(PROMPT, seeded(n=4))
    # The prompt once, then for each other child what lies past its three full blocks; 11 more rows for each.
    assert sum(rows) == 13 + 3 * 1 + 4 * 11
