"""What a step does with drafts: where they end, whose confidence is known, which rule judges them."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from speculating import check_same, drafting, pair, random_prompts
from toys.checkpoints import open_toy, write_toy
from toys.checks import assert_clean
from toys.device_drafters import TEXTS

from deepinfer_core import SamplingParams
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
