"""Speculation beside everything that an engine does: every pair of features stands together in some engine.

A covering array of strength two: rows of one level for each factor, such that any two levels of two factors meet in a
row. Each row is an engine with a drafter and requests; results are those of a plain engine with nothing but the same
requests, where the row's request features are those of half of the requests and the others are strangers.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from speculating import drafting, tell
from toys.checkpoints import open_toy, write_toy
from toys.checks import assert_clean
from toys.device_drafters import TEXTS
from toys.drafters import assert_same

from deepinfer_core import LLM, SamplingParams

REQUEST: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "temperature": ({"temperature": 0.0}, {"temperature": 0.9}),
    "filters": ({}, {"top_k": 30, "top_p": 0.9}, {"min_p": 0.002}),
    "penalties": ({}, {"repetition_penalty": 1.3}, {"presence_penalty": 0.7, "frequency_penalty": -0.3}),
    "bias": ({}, {"logit_bias": {97: 3.0, 98: -100.0, 120: 5.0}}),
    "bad words": ({}, {"bad_words": ["a", "fo", "ND bar", "xyz"]}),
    "min_tokens": ({}, {"min_tokens": 7}),
    "allowed": ({}, {"allowed_token_ids": [*range(60, 130), 256]}),
    "stops": ({}, {"stop": ["q", "zz"], "include_stop_str_in_output": True}, {"stop_token_ids": [101, 70]}),
    "logprobs": ({}, {"logprobs": 2, "prompt_logprobs": 1}, {"logprobs": 1, "logprobs_mode": "processed"}),
    "grammar": ({}, {"structured_outputs": {"regex": "[a-z]{3}(ab|x)[A-Za-z ]{2,9}q?"}}),
    "n": ({}, {"n": 3}),
}
ENGINE: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "loop": ({"scheduling__async_scheduling": False}, {"scheduling__async_scheduling": True}),
    "prefixes": ({"kv_cache__prefix_cache": False}, {"kv_cache__prefix_cache": True}),
    "chunks": ({}, {"scheduling__max_batch_tokens": 11}),
    "pool": ({}, {"kv_cache__num_blocks": 12}),
    "depth": tuple({"speculation__max_draft_tokens": depth} for depth in (1, 2, 5, 8)),
    "verify": ({"speculation__verify": "exact"}, {"speculation__verify": "rejection"}),
    "drafter": (
        {"speculation__method": "told"},
        {"speculation__method": "told", "plugins__device_drafters__certain": False},
        {"speculation__method": "ngram"},
        {"speculation__method": "draft_model"},
    ),
    "schedule": ({"speculation__schedule": "fixed"}, {"speculation__schedule": "confidence"}),
}
OTHER: Mapping[str, Sequence[Any]] = {
    "groups": ({"full": None}, {"near": 10}, {"full": None, "near": 9}),
    "abort": (False, True),
    "together": (2, 8, 16),
}
FACTORS: Mapping[str, Sequence[Any]] = {**REQUEST, **ENGINE, **OTHER}
Row = Mapping[str, int]
Pair = tuple[tuple[str, int], tuple[str, int]]


def every_pair() -> set[Pair]:
    return {
        ((one, i), (other, j))
        for one, other in itertools.combinations(FACTORS, 2)
        for i in range(len(FACTORS[one]))
        for j in range(len(FACTORS[other]))
    }


def pairs_of(row: Row) -> set[Pair]:
    return {((one, row[one]), (other, row[other])) for one, other in itertools.combinations(FACTORS, 2)}


def random_row(rng: random.Random, open_pairs: set[Pair]) -> dict[str, int]:
    """Factors in a random order, each set to the level that meets most new pairs with those before it."""
    row: dict[str, int] = {}

    def gain(name: str, level: int) -> float:
        met = [((name, level), (other, row[other])) for other in row]
        return sum(pair in open_pairs or pair[::-1] in open_pairs for pair in met) + rng.random() / 2

    for name in rng.sample(list(FACTORS), len(FACTORS)):
        gains = [gain(name, level) for level in range(len(FACTORS[name]))]
        row[name] = gains.index(max(gains))
    return row


def covering_array() -> list[Row]:
    """Greedy: of some random rows the one that covers most, until every pair is covered."""
    rng, open_pairs, rows = random.Random(0), every_pair(), []
    while open_pairs:
        tried = [random_row(rng, open_pairs) for _ in range(30)]
        rows.append(max(tried, key=lambda row: len(pairs_of(row) & open_pairs)))
        open_pairs -= pairs_of(rows[-1])
    return rows


ROWS = covering_array()


def test_every_pair_meets() -> None:
    assert set().union(*map(pairs_of, ROWS)) == every_pair()
    assert len(ROWS) < 50


def params_of(row: Row, seed: int) -> SamplingParams:
    fields: dict[str, Any] = {"max_tokens": 18, "seed": seed}
    for name, levels in REQUEST.items():
        fields |= levels[row[name]]
    return SamplingParams(**fields)


def requests(row: Row, strangers: Row) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(random.randrange(10**6))
    shared = [rng.randrange(97, 123) for _ in range(9)]
    count = OTHER["together"][row["together"]]
    lengths = [rng.randrange(1, 12) for _ in range(count)]
    prompts = [[*shared, *(rng.randrange(97, 123) for _ in range(length))] for length in lengths]
    return prompts, [params_of(row if i % 2 else strangers, seed=i) for i in range(count)]


def finished(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], *, abort: bool) -> list[Any]:
    """Results; under ``abort`` of all but the first request, which ends in the middle."""
    if not abort:
        return llm.generate(list(prompts), params)
    core, intake = llm.engine.core, llm.engine.intake
    given = enumerate(zip(prompts, params, strict=True))
    made = [intake.request(str(i), list(prompt), p, now=0.0, stream=False) for i, (prompt, p) in given]
    core.add(made)
    for _ in range(4):
        core.step()
    core.abort(["0"])
    while core.has_unfinished:
        core.step()
    return [llm.output(request) for request in made[1:]]


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_a_row_of_features(tmp_path: Path, number: int) -> None:
    row, strangers = ROWS[number], ROWS[number - 1]
    directory = write_toy(tmp_path / "toy", "PrefixHash", tokenizer=True, groups=OTHER["groups"][row["groups"]])
    prompts, params = requests(row, strangers)
    settings: dict[str, Any] = drafting("told", plugins__device_drafters__right=-1, plugins__device_drafters__vocab=256)
    settings["plugins__spec_decode__draft_model"] = str(directory)
    for name, levels in ENGINE.items():
        settings |= levels[row[name]]
    settings["plugins__paths"] = ["toys.plugin", "toys.device_drafters", "toys.grammar_plugin"]
    if settings["speculation__method"] != "told":
        settings = {k: v for k, v in settings.items() if not k.startswith("plugins__device_drafters")}
    abort = OTHER["abort"][row["abort"]]
    plain = open_toy(directory, plugins__paths=["toys.plugin", "toys.grammar_plugin"], kv_cache__prefix_cache=False)
    expected = plain.generate(list(prompts), params)
    TEXTS.clear()
    tell(expected)
    plain.close()
    fast = open_toy(directory, **settings)
    if settings["speculation__schedule"] == "confidence" and settings["speculation__method"] != "told":
        fast.engine.core.planner.drafting.schedule.drafts = lambda requests, fresh: requests  # type: ignore[union-attr]
    for _ in range(2):  # the second time prefixes are found
        found = finished(fast, prompts, params, abort=abort)
        assert_same(found, expected[1:] if abort else expected)
        assert_clean(fast)
    assert fast.engine.core.speculator is not None
    assert fast.engine.core.speculator.failures == 0
    speculator = fast.engine.core.speculator
    if settings["speculation__method"] in ("told", "draft_model"):
        assert speculator.accepted > 0 or not row["together"]
    if row["pool"] and row["together"] and "full" in OTHER["groups"][row["groups"]]:
        assert fast.engine.core.planner.preemption.count > 0
    if row["prefixes"] and 1 not in (row["logprobs"], strangers["logprobs"]):  # of a prompt, they need all its rows
        assert sum(output.metrics.cached_tokens for output in found) > 0
    if row["grammar"] and row["together"]:
        assert any(output.outputs[0].text for output in found)
    fast.close()
