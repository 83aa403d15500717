"""Prefix cache: what is shared, who may share it, and that a hit never changes a result."""

from __future__ import annotations

from typing import Any

import pytest
from toys.checkpoints import ACCELERATOR, SMALL, open_toy, write_toy
from toys.checks import assert_clean, ids_of
from toys.oracle import HashOracle
from toys.tiny_llama import write_tiny

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.engine.block_hash import domain_key

GREEDY = SamplingParams(temperature=0, max_tokens=6)
ORACLE = HashOracle(64, [None])
LONG = [(11 * i + 3) % 64 for i in range(40)]
GROUPS: list[dict[str, int | None]] = [
    {"full": None},
    {"full": None, "near": 6},
    {"near": 9},
    {"a": 1, "b": 4, "c": None},
]


@pytest.fixture(params=[False, True], ids=["sync", "ahead"])
def ahead(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def cached(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> int:
    """Tokens the cache gave to one more run of this prompt."""
    return llm.generate([prompt], params)[0].metrics.cached_tokens


def findable(llm: LLM, prompt: list[int]) -> int:
    """Tokens of a prompt in blocks that could be shared now. Changes nothing."""
    request = llm.engine.intake.request("asked", [*prompt, 63], GREEDY, now=0.0, stream=False)
    return llm.engine.core.planner.lookup(request.sequences[0]).tokens


@pytest.mark.parametrize("groups", GROUPS, ids=lambda g: "+".join(g))
@pytest.mark.parametrize("length", range(1, 18))
def test_hit_at_every_length_gives_the_cold_result(toy_llm: Any, ahead: bool, groups: Any, length: int) -> None:
    """After a run of the whole prompt, each of its prefixes, and each with another end."""
    llm = toy_llm("PrefixHash", groups=groups, scheduling__async_scheduling=ahead)
    oracle = HashOracle(64, list(groups.values()))
    assert ids_of(llm.generate([LONG], GREEDY)) == [oracle.tokens(LONG, 6)]
    prompts = [LONG[:length], [*LONG[:length], 63], [*LONG[:length], 1, 2, 3, 4, 5]]
    outputs = llm.generate(prompts, GREEDY)
    assert ids_of(outputs) == [oracle.tokens(p, 6) for p in prompts]
    assert ids_of(llm.generate(prompts, GREEDY)) == ids_of(outputs)
    assert ids_of(llm.generate([LONG], GREEDY)) == [oracle.tokens(LONG, 6)]
    assert_clean(llm)


def test_whole_blocks_are_shared_and_one_token_is_computed(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("PrefixHash", scheduling__async_scheduling=ahead)
    llm.generate([LONG], GREEDY)
    hits = [cached(llm, [*LONG[:length], 1, 2]) for length in range(1, 18)]
    assert hits == [length // 4 * 4 for length in range(1, 18)]
    assert [cached(llm, LONG[:length]) for length in (8, 9, 12, 40)] == [7, 8, 11, 39]


@pytest.mark.parametrize("tokens", [1, 2, 6])
def test_the_prompt_is_cached_even_when_it_ends_at_once(toy_llm: Any, ahead: bool, tokens: int) -> None:
    llm = toy_llm("PrefixHash", scheduling__async_scheduling=ahead)
    assert [cached(llm, LONG[:17], SamplingParams(max_tokens=tokens)) for _ in range(2)] == [0, 16]


def test_outputs_are_cached_too(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("PrefixHash", scheduling__async_scheduling=ahead)
    prompt = LONG[:5]
    answer = ids_of(llm.generate([prompt], SamplingParams(temperature=0, max_tokens=12)))[0]
    # 17 tokens are known, of the last one no row was computed.
    assert cached(llm, [*prompt, *answer, 1]) == 16


def test_off_shares_nothing(toy_llm: Any) -> None:
    llm = toy_llm("PrefixHash", kv_cache__prefix_cache=False)
    assert [cached(llm, LONG) for _ in range(2)] == [0, 0]
    assert llm.engine.core.planner.cache.groups["full"].pool.num_cached == 0


def test_one_different_token_ends_the_shared_part(toy_llm: Any) -> None:
    llm = toy_llm("PrefixHash")
    llm.generate([LONG], GREEDY)
    for place in (0, 3, 4, 13, 39):
        changed = [*LONG]
        changed[place] = 62
        assert cached(llm, changed) == place // 4 * 4
        assert ids_of(llm.generate([changed], GREEDY)) == [ORACLE.tokens(changed, 6)]


def test_same_blocks_after_another_beginning_are_not_shared(toy_llm: Any) -> None:
    llm = toy_llm("PrefixHash")
    llm.generate([[1, 2, 3, 4, *LONG[:8]]], GREEDY)
    assert cached(llm, [4, 3, 2, 1, *LONG[:8]]) == 0


def test_salts_are_domains_of_their_own(toy_llm: Any) -> None:
    llm = toy_llm("PrefixHash")
    salts = ["a", "b", "a", None, "", "a", "ab"]
    hits = [cached(llm, {"prompt_token_ids": LONG[:9], "cache_salt": salt}) for salt in salts]
    assert hits == [0, 0, 8, 0, 8, 8, 0]


def test_models_are_domains_of_their_own(tmp_path: Any) -> None:
    keys = []
    for name in ("one", "two"):
        with open_toy(write_toy(tmp_path / name, "PrefixHash")) as llm:
            keys.append(llm.engine.intake.request("0", LONG, GREEDY, now=0.0, stream=False).root_key)
    assert keys[0] != keys[1]


def test_numerics_and_cache_formats_are_domains_of_their_own(tmp_path: Any) -> None:
    """What one engine's blocks hold is of no use to another that computes, rounds or lays out otherwise."""
    write_tiny(tmp_path)
    settings: list[dict[str, Any]] = [
        *({}, {"model.dtype": "bfloat16"}, {"kv_cache.dtype": "fp8"}, {"model.fp8_activations": True}),
        *([{"kv_cache.block_size": 32}] if ACCELERATOR == "cpu" else []),  # keys lie transposed there
    ]
    keys = []
    for changed in settings:
        with LLM(tmp_path, accelerator=ACCELERATOR, **{**SMALL, **changed}) as llm:
            keys.append(llm.engine.intake.request("0", LONG, GREEDY, now=0.0, stream=False).root_key)
    assert len(set(keys)) == len(settings)


def test_parts_of_a_domain_do_not_run_together() -> None:
    parts = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("", "abc"), ("a", "b", "c"), ("c", "ab"), (), ("",)]
    assert len({domain_key(*part) for part in parts}) == len(parts)


def test_seed_and_parameters_do_not_matter(toy_llm: Any) -> None:
    llm = toy_llm("PrefixHash")
    llm.generate([LONG], GREEDY)
    assert cached(llm, LONG, SamplingParams(seed=9, top_k=3, presence_penalty=1.0)) == 39


def test_reused_blocks_lose_their_old_identity(toy_llm: Any) -> None:
    """A pool of six blocks, prompts of four: each run evicts the last, and none is ever served another's."""
    llm = toy_llm("PrefixHash", kv_cache__num_blocks=7)
    prompts = [[(i + j) % 64 for j in range(17)] for i in range(5)]
    for prompt in prompts * 3:
        assert ids_of(llm.generate([prompt], SamplingParams(temperature=0, max_tokens=3))) == [ORACLE.tokens(prompt, 3)]
    assert llm.engine.core.planner.cache.groups["full"].pool.evictions > 0
    assert_clean(llm)


def test_the_oldest_is_evicted_first_and_tails_before_heads(toy_llm: Any) -> None:
    llm = toy_llm("PrefixHash", kv_cache__num_blocks=9)
    one = SamplingParams(temperature=0, max_tokens=1)
    old, young, other = [1] * 12, [2] * 12, [3] * 12
    for prompt in (old, young, other):  # three blocks each, eight in the pool: other takes the tail of old
        assert cached(llm, prompt, one) == 0
    pool = llm.engine.core.planner.cache.groups["full"].pool
    assert (pool.num_cached, pool.evictions) == (8, 1)
    assert [findable(llm, prompt) for prompt in (old, young, other)] == [8, 12, 12]
    assert cached(llm, [*old, 9], one) == 8  # takes two more, and those of old are young again
    assert [findable(llm, prompt) for prompt in (old, young, other)] == [12, 4, 12]


def test_equal_prompts_in_one_step(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("PrefixHash", scheduling__async_scheduling=ahead)
    for length in (8, 9):
        outputs = llm.generate([LONG[:length]] * 3, GREEDY)
        assert ids_of(outputs) == [ORACLE.tokens(LONG[:length], 6)] * 3
    assert_clean(llm)


def test_completions_of_one_prompt_compute_it_once(toy_llm: Any, ahead: bool) -> None:
    """The others wait for the first one's blocks: then each has its last token to compute, and no more."""
    llm = toy_llm("PrefixHash", scheduling__async_scheduling=ahead)
    rows: list[int] = []
    llm.engine.model.before = lambda batch: rows.append(len(batch.positions))
    for n, length, budget in ((3, 9, 64), (4, 16, 64), (2, 30, 7)):
        rows.clear()
        llm.engine.core.planner.max_batch_tokens = llm.engine.core.planner.budget = budget
        (output,) = llm.generate([[n, *LONG[:length]]], SamplingParams(seed=1, n=n, max_tokens=1))
        shared = (length + 1) // 4 * 4
        assert sum(rows) == length + 1 + (n - 1) * max(length + 1 - shared, 1)
        assert output.metrics.cached_tokens == (n - 1) * min(shared, length)
    assert_clean(llm)


def test_full_hit_leaves_the_shared_block_alone(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("PrefixHash", scheduling__async_scheduling=ahead)
    llm.generate([LONG[:8]], GREEDY)
    blocks = llm.engine.core.runner.layer_caches["full"][0]["token"]
    before = blocks[1:3].clone()
    assert before.flatten().tolist() == LONG[:8]
    blocks[1, 3] = blocks[2, 3] = 60  # were the shared rows written again, this would be mended
    llm.generate([LONG[:8]], GREEDY)
    assert blocks[1:3, 3].tolist() == [60, 60]
    blocks[1:3] = before
    assert cached(llm, LONG[:8]) == 7
    assert cached(llm, [*LONG[:8], 5]) == 8


def test_a_nan_row_publishes_no_block(toy_llm: Any, ahead: bool) -> None:
    """What a broken step wrote must not be served to the next request with the same prompt."""
    llm = toy_llm("PrefixHash", scheduling__async_scheduling=ahead)
    llm.engine.model.after = lambda logits: logits * float("nan")
    assert llm.generate([LONG], GREEDY)[0].error.code == "nan_logits"
    llm.engine.model.after = lambda logits: logits
    assert cached(llm, LONG) == 0
    assert_clean(llm)


def test_window_groups_share_where_a_request_ended(toy_llm: Any) -> None:
    llm = toy_llm("PrefixHash", groups={"near": 6}, kv_cache__prefix_cache=True)
    oracle = HashOracle(64, [6])
    first = llm.generate([LONG[:17]], SamplingParams(temperature=0, max_tokens=1))
    assert cached(llm, [*LONG[:17], 3]) == 16
    assert ids_of(first) == [oracle.tokens(LONG[:17], 1)]
    assert_clean(llm)


@pytest.mark.parametrize(("retention", "inside"), [("full", 16), ("minimal", 0)])
@pytest.mark.parametrize("groups", [{"near": 6}, {"full": None, "near": 5}], ids=lambda g: "+".join(g))
def test_what_slid_out_of_a_window_is_retained_or_not(
    toy_llm: Any, groups: dict[str, int | None], retention: str, inside: int
) -> None:
    """``minimal``: a prefix is continued from where a request ended, and from nowhere else; results are the same."""
    llm = toy_llm("PrefixHash", groups=groups, scheduling__max_batch_tokens=8, kv_cache__window_retention=retention)
    oracle = HashOracle(64, list(groups.values()))
    llm.generate([LONG], SamplingParams(temperature=0, max_tokens=1))
    for prompt, hit in (([*LONG[:16], 1, 2], inside), ([*LONG, 9], 40)):
        (output,) = llm.generate([prompt], GREEDY)
        assert output.metrics.cached_tokens == hit
        assert output.outputs[0].token_ids == oracle.tokens(prompt, 6)
    assert_clean(llm)
