"""What a step does with drafts: where they end, whose confidence is known, which rule judges them."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from speculating import check_same, drafting, pair, random_prompts
from toys.checkpoints import open_toy, write_toy
from toys.checks import assert_clean
from toys.device_drafters import TEXTS
from toys.oracle import count_tokens

from deepinfer_core import SamplingParams
from deepinfer_core.api import FRESH_TOKENS, ConfigError
from deepinfer_core.engine.speculation import last_tokens

GREEDY = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True)


def test_the_newest_token_is_that_after_the_accepted_drafts() -> None:
    plan: Any = SimpleNamespace(
        slots=np.array([4, 1, 7]), samples=np.array([4, 1, 0]), drafts={4: np.array([10, 11, 12])}
    )
    tokens = np.array([10, 11, 99, -1, 55])
    for accepted, newest in ((0, 10), (1, 11), (2, 99), (3, -1)):
        assert last_tokens(plan, tokens, np.array([accepted, 0, 0])).tolist() == [newest, 55, -1]
    assert last_tokens(plan, tokens[:0], np.zeros(3, np.int64)).tolist() == [-1, -1, -1]


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("gap", [0, 1, 3])
def test_a_draft_ends_at_the_first_id_that_is_no_token(tmp_path: Path, gap: int, ahead: bool) -> None:
    directory = write_toy(tmp_path / "toy", "PrefixHash")
    more = {"plugins__device_drafters__gap": gap, "scheduling__async_scheduling": ahead}
    plain, fast = pair(directory, drafting("told", **more))
    (expected,) = plain.generate([[5, 6, 7]], GREEDY)
    TEXTS[:] = [[5, 6, 7, *expected.outputs[0].token_ids]]
    (found,) = fast.generate([[5, 6, 7]], GREEDY)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    heard = fast.engine.core.speculator.drafter.heard  # type: ignore[union-attr]
    assert max((result.proposed for result in heard), default=0) == gap
    assert all(result.accepted == result.proposed for result in heard[:-1])
    plain.close()
    fast.close()


def test_nothing_is_known_of_who_comes_after_in_a_slot(tmp_path: Path) -> None:
    """Its first drafts count as certain, whatever was said of those of the request before it."""
    more = {"speculation__schedule": "confidence", "plugins__device_drafters__confidence": "zero"}
    llm = open_toy(
        write_toy(tmp_path / "toy", "PrefixHash"),
        **drafting("told", depth=3, **more),
        scheduling__async_scheduling=True,
        scheduling__max_running=1,
    )
    schedule: Any = llm.engine.core.planner.drafting.schedule  # type: ignore[union-attr]
    seen: list[list[float]] = []

    def budget(survival: Any, caps: Any, rows: int, *, delayed: bool) -> int:
        seen.append(survival[0].tolist())
        return 0

    schedule.budget, schedule.drafts = budget, lambda requests, fresh: requests
    for _ in range(3):
        seen.clear()
        llm.generate([[1, 2, 3]], GREEDY)
        assert seen[0] == [1.0, 1.0, 1.0]
        assert seen[2] == [0.0, 0.0, 0.0]
    llm.close()


@pytest.mark.parametrize(
    ("verify", "certain", "rule"),
    [
        ("auto", True, "exact"),
        ("auto", False, "rejection"),
        ("rejection", True, "rejection"),
        ("exact", False, "exact"),
    ],
)
def test_which_rule_judges(tmp_path: Path, verify: str, certain: bool, rule: str) -> None:
    """``auto`` judges drafts without a distribution exactly; requests with a seed are always judged so."""
    more = {"speculation__verify": verify, "plugins__device_drafters__certain": certain}
    llm = open_toy(write_toy(tmp_path / "toy", "PrefixHash"), **drafting("told", **more))
    for seed, wanted in ((None, rule), (3, "exact")):
        speculator = llm.engine.core.speculator
        assert speculator is not None
        drafter: Any = speculator.drafter
        drafter.heard.clear()
        llm.generate([[1, 2, 3]], SamplingParams(temperature=1.0, seed=seed, max_tokens=9))
        assert {result.rule for result in drafter.heard} == {wanted}
    llm.close()


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("groups", [{"full": None}, {"near": 9}])
def test_requests_as_long_as_the_model_takes(tmp_path: Path, groups: dict[str, int | None], ahead: bool) -> None:
    """A module drafts rows past the newest token: not where the target's context ends."""
    directory = write_toy(tmp_path / "toy", "PrefixHash", groups=groups, max_len=22)
    more = {"plugins__spec_decode__draft_model": str(directory), "scheduling__async_scheduling": ahead}
    plain, fast = pair(directory, drafting("draft_model", depth=5, **more))
    prompts = random_prompts(random.Random(7), 6)
    check_same(plain, fast, prompts, SamplingParams(temperature=0, ignore_eos=True))
    assert_clean(fast)
    plain.close()
    fast.close()


@pytest.mark.parametrize("method", ["ngram", "told"])
def test_no_draft_is_longer_than_the_target_reads(tmp_path: Path, method: str) -> None:
    """Refused at start, before tables of so many columns are made; the longest that fits works."""
    directory = write_toy(tmp_path / "toy", "Count", max_len=22)
    for depth in (22, 10**12):
        with pytest.raises(ConfigError, match=rf"^speculation\.max_draft_tokens={depth}: .*set it to 21 or lower$"):
            open_toy(directory, **drafting(method, depth=depth))
    with open_toy(directory, **drafting(method, depth=21)) as llm:
        (output,) = llm.generate([[1, 2, 1, 2, 1, 2]], GREEDY)
    assert output.outputs[0].token_ids == count_tokens([2], 16, 64)


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_drafts_keep_to_the_rows_of_a_step(tmp_path: Path, ahead: bool) -> None:
    """A step has room for fewer drafts than its requests have: the first take what there is."""
    more = {"scheduling__max_batch_tokens": 9, "scheduling__async_scheduling": ahead}
    llm = open_toy(write_toy(tmp_path / "toy", "Count"), **drafting("told", depth=5, **more))
    running = llm.engine.core.runner.drafting
    assert running is not None
    resolve, rows = running.resolve, []

    def resolved(plan: Any) -> Any:
        found = resolve(plan)
        rows.append((int(found.counts.sum()), sum(map(len, found.drafts.values()))))
        return found

    running.resolve = resolved  # type: ignore[method-assign]
    outputs = llm.generate([[i, i + 1] for i in range(4)], GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [count_tokens([i + 1], 18, 64) for i in range(4)]
    assert max(count for count, _ in rows) <= 9
    assert max(drafts for _, drafts in rows) == 5
    llm.close()


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(6))
def test_a_drafter_that_raises_while_drafting_stops_and_starts(tmp_path: Path, seed: int, ahead: bool) -> None:
    """Drafts that were planned for and did not come, in steps that draft for nobody."""
    directory = write_toy(tmp_path / "toy", "PrefixHash")
    more = {"plugins__device_drafters__every": 2, "plugins__device_drafters__seed": seed}
    settings = drafting("told", **more, speculation__schedule="confidence", scheduling__async_scheduling=ahead)
    plain, fast = pair(directory, settings)
    prompts = random_prompts(random.Random(seed), 5)
    expected = [o.outputs[0].token_ids for o in plain.generate(list(prompts), GREEDY)]
    TEXTS[:] = [p + e for p, e in zip(prompts, expected, strict=True)]
    assert [o.outputs[0].token_ids for o in fast.generate(list(prompts), GREEDY)] == expected
    assert fast.engine.core.speculator.failures > 0  # type: ignore[union-attr]
    assert_clean(fast)
    plain.close()
    fast.close()


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    "change",
    [
        {"scores": lambda p: p.scores[:, :-1]},
        {"scores": lambda p: p.scores[:, :, :-1]},
        {"scores": lambda p: p.scores[:-1]},
        {"notes": lambda p: torch.zeros(len(p.tokens), 1)},
        {"notes": lambda p: torch.zeros(1, p.tokens.shape[1])},
        {"confidence": lambda p: torch.ones(len(p.tokens), 2)},
        {"tokens": lambda p: p.tokens[:, 0]},
        {"tokens": lambda p: p.tokens.float()},
    ],
    ids=["scores of fewer drafts", "narrow scores", "scores of fewer requests", "notes", "fewer notes", "confidence",
         "flat", "no integers"],
)  # fmt: skip
def test_a_wrong_proposal_costs_its_drafts(tmp_path: Path, change: dict[str, Any], ahead: bool) -> None:
    """Never a request, nor another's drafts: every second proposal is wrong."""
    more = {"plugins__device_drafters__certain": False, "scheduling__async_scheduling": ahead}
    llm = open_toy(write_toy(tmp_path / "toy", "PrefixHash"), **drafting("told", **more))
    speculator = llm.engine.core.speculator
    assert speculator is not None
    drafter: Any = speculator.drafter
    propose, turn = drafter.propose, itertools.count()

    def proposed(step: Any) -> Any:
        made = propose(step)
        return made if next(turn) % 2 else attrs.evolve(made, **{name: make(made) for name, make in change.items()})

    drafter.propose = proposed
    params = SamplingParams(temperature=0.7, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([[n, 1, 2] for n in range(4)], params)
    assert [(o.outputs[0].finish_reason, len(o.outputs[0].token_ids)) for o in outputs] == [("length", 12)] * 4
    assert speculator.failures > 1
    assert speculator.proposed > 10
    assert_clean(llm)
    llm.close()


def test_nothing_is_drafted_where_one_token_is_left(tmp_path: Path) -> None:
    llm = open_toy(write_toy(tmp_path / "toy", "Count"), **drafting("told"))
    speculator = llm.engine.core.speculator
    assert speculator is not None
    drafter: Any = speculator.drafter
    asked, propose = [], drafter.propose
    drafter.propose = lambda step: asked.append(step) or propose(step)
    for tokens, most in ((1, 0), (2, 0), (3, 1), (5, 3)):
        drafter.heard.clear()
        asked.clear()
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
        assert max((result.proposed for result in drafter.heard), default=0) == most
        assert bool(asked) == bool(most)
    llm.close()


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_requests_that_enter_by_and_by_are_asked_for_together(tmp_path: Path, ahead: bool) -> None:
    """Prompts of 8 tokens, and 20 rows a step: the third prompt is cut, the others wait. With few blocks
    they are not about to run."""
    more = {"speculation__schedule": "confidence", "scheduling__async_scheduling": ahead}
    prompts = [[n] * 8 for n in range(1, 7)]
    for blocks, first in ((None, 6), (7, 3)):
        groups = {**more, "scheduling__max_batch_tokens": 20, "kv_cache__num_blocks": blocks, "kv_cache__block_size": 4}
        llm = open_toy(write_toy(tmp_path / "toy", "Count"), **drafting("told", **groups))
        schedule: Any = llm.engine.core.planner.drafting.schedule  # type: ignore[union-attr]
        asked: list[tuple[int, int]] = []
        schedule.drafts = lambda requests, fresh, asked=asked: asked.append((requests, fresh)) or 0
        llm.generate(list(prompts), GREEDY)
        assert asked[0] == (first, first)
        llm.close()


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_it_is_told_how_many_requests_begin_their_text(tmp_path: Path, ahead: bool) -> None:
    """Two requests grow together; the third comes when they have sampled some ten tokens."""
    more = {"speculation__schedule": "confidence", "scheduling__async_scheduling": ahead}
    llm = open_toy(write_toy(tmp_path / "toy", "Count"), **drafting("told", **more))
    core, longer = llm.engine.core, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    schedule: Any = core.planner.drafting.schedule  # type: ignore[union-attr]
    asked: list[tuple[int, int]] = []
    schedule.drafts = lambda requests, fresh: asked.append((requests, fresh)) or 1  # drafting, it is asked each time

    def request(n: int) -> Any:
        return llm.engine.intake.request(str(n), [n, 1, 2], longer, now=0.0, stream=False)

    core.add([request(1), request(2)])
    while len(asked) < 10:
        core.step()
    core.add([request(3)])
    while core.has_unfinished:
        core.step()
    llm.close()
    for together, kinds in ((2, {0, 1, 2}), (3, {0, 1})):
        told = [fresh for requests, fresh in asked if requests == together]
        assert told == sorted(told, reverse=True)
        assert {0, max(kinds)} <= set(told) <= kinds
        assert sum(fresh > 0 for fresh in told) <= FRESH_TOKENS + 1


def test_what_is_no_token_has_no_chance(tmp_path: Path) -> None:
    more = {"plugins__device_drafters__gap": 2, "speculation__schedule": "confidence"}
    llm = open_toy(write_toy(tmp_path / "toy", "Count"), **drafting("told", depth=4, **more))
    schedule: Any = llm.engine.core.planner.drafting.schedule  # type: ignore[union-attr]
    seen: list[list[float]] = []

    def budget(survival: Any, caps: Any, rows: int, *, delayed: bool) -> int:
        seen.append(survival[0].tolist())
        return 0

    schedule.budget, schedule.drafts = budget, lambda requests, fresh: requests
    llm.generate([[1, 2, 3]], GREEDY)
    assert seen[0] == [1.0, 1.0, 0.0, 0.0]
    llm.close()


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_planned_drafts_that_never_came_are_taken_back(tmp_path: Path, ahead: bool) -> None:
    """The step that should make them raises, and the one planned for them drafts for nobody."""
    directory = write_toy(tmp_path / "toy", "PrefixHash")
    settings = drafting("told", speculation__schedule="confidence", scheduling__async_scheduling=ahead)
    plain, fast = pair(directory, settings)
    speculator, planning = fast.engine.core.speculator, fast.engine.core.planner.drafting
    assert speculator is not None
    assert planning is not None
    schedule: Any = planning.schedule
    turns = iter([1, 1, 0] * 100)
    proposed = iter([True, False] * 100)
    propose, drafter = speculator.drafter.propose, speculator.drafter  # type: ignore[attr-defined]

    def now_and_then(step: Any) -> Any:
        if next(proposed):
            return propose(step)
        raise RuntimeError("no drafts this time")

    drafter.propose = now_and_then  # type: ignore[method-assign]
    schedule.budget = lambda survival, caps, rows, delayed: int(caps.sum())
    schedule.drafts = lambda requests, fresh: requests * next(turns)
    prompts = random_prompts(random.Random(2), 3)
    expected = [o.outputs[0].token_ids for o in plain.generate(list(prompts), GREEDY)]
    TEXTS[:] = [p + e for p, e in zip(prompts, expected, strict=True)]
    assert [o.outputs[0].token_ids for o in fast.generate(list(prompts), GREEDY)] == expected
    assert speculator.failures > 1
    assert speculator.accepted > 2
    plain.close()
    fast.close()
