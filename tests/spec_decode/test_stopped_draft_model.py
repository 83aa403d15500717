"""A draft model that nobody drafts with runs nothing; what it missed it reads before it drafts again."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deepinfer_spec_decode.draft_model import Missing
from deepinfer_spec_decode.schedule import ConfidenceSchedule
from speculating import check_same, drafting
from toys.checkpoints import open_toy, write_toy

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.engine import speculation_plan


def rows_run(llm: LLM) -> list[int]:
    """Rows of each forward pass of the draft model, from now on."""
    found: list[int] = []
    speculator: Any = llm.engine.core.speculator
    speculator.drafter._model.before = lambda batch: found.append(len(batch.token_ids))
    return found


def settings(directory: Path, **more: Any) -> dict[str, Any]:
    return drafting(
        "draft_model",
        depth=3,
        plugins__spec_decode__draft_model=str(directory),
        plugins__spec_decode__cost_cache="off",
        speculation__schedule="confidence",
        **more,
    )


@pytest.fixture
def _certain(monkeypatch: pytest.MonkeyPatch) -> None:
    """All drafts are verified, and the schedule is asked in each step."""
    monkeypatch.setattr(ConfidenceSchedule, "budget", lambda self, survival, caps, rows, delayed: int(caps.sum()))
    monkeypatch.setattr(speculation_plan, "ASKED_EACH", 1)


@pytest.mark.usefixtures("_certain")
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
@pytest.mark.parametrize("prefixes", [False, True])
def test_after_pauses_it_is_right_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool, prefixes: bool
) -> None:
    """It is the target itself, whose logits depend on every row of the caches: with prompts in chunks, prefixes found
    that it never ran, preemption, and blocks that had others' rows before."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    monkeypatch.setattr(ConfidenceSchedule, "drafts", lambda self, n, fresh: rng.choice([0, 0, 0, 1, 2, n]))
    directory = write_toy(tmp_path / "toy", "PrefixHash")
    options = {
        "scheduling__async_scheduling": ahead,
        "scheduling__max_batch_tokens": 19,
        "kv_cache__num_blocks": 40,
        "kv_cache__prefix_cache": prefixes,
    }
    plain = open_toy(directory, **options)
    fast = open_toy(directory, **options, **settings(directory))
    with plain, fast:
        rows = rows_run(fast)
        prompts = [[*range(9), i, *range(i)] for i in range(8)]
        for _ in range(3):
            check_same(plain, fast, prompts, SamplingParams(temperature=1.0, seed=4, max_tokens=21))
        speculator: Any = fast.engine.core.speculator
        assert speculator.accepted == speculator.proposed > 60
        assert max(rows) <= 19


@pytest.mark.usefixtures("_certain")
def test_while_stopped_it_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then all it missed of the one request that is drafted for, and of no other."""
    wanted = [0]
    monkeypatch.setattr(ConfidenceSchedule, "drafts", lambda self, n, fresh: wanted[0])
    directory = write_toy(tmp_path / "toy", "PrefixHash")
    with open_toy(directory, **settings(directory)) as llm:
        rows = rows_run(llm)
        prompts = [[i, *range(10)] for i in range(4)]
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20))
        assert rows == []
        wanted[0] = 1
        llm.generate([[9, *range(12)]], SamplingParams(temperature=0, max_tokens=3))
        assert rows[:4] == [13, 1, 1, 1]


def test_missing_rows_are_those_from_the_first_on() -> None:
    """Blocks of 4: two requests share block 2; the null block is never asked for."""
    missing = Missing()
    missing.add({"a": np.array([9, 10, 12, 20, 1])})
    tables, sizes = {"a": np.array([[2, 3, 0], [2, 5, 0]], np.int32)}, {"a": 4}
    assert missing.take({"a": tables["a"][:1]}, np.array([7]), sizes).tolist() == [6]
    assert missing.take(tables, np.array([7, 7]), sizes).tolist() == [0, 3]
    assert missing.take(tables, np.array([7, 7]), sizes).tolist() == [0, 0]
    missing.add({"a": np.array([1, 13])})
    assert missing.take(tables, np.array([9, 9]), sizes).tolist() == [4, 0]
