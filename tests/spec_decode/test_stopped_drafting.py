"""While drafting is stopped almost nothing is done for it, and later drafts are what they would have been."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from deepinfer_spec_decode import dspark as drafters
from deepinfer_spec_decode import mtp as mtp_drafter
from deepinfer_spec_decode import schedule
from deepinfer_spec_decode.schedule import ENOUGH, PROBED, ConfidenceSchedule
from deepinfer_spec_decode.waiting import WaitingRows
from test_deepseek_v4 import BLOCK, PROMPTS, open_llm, recorded
from v4.support import random_tokens
from v4_drafters import V4, assert_confident, dspark, mtp

from deepinfer_core import SamplingParams
from deepinfer_core.api import ModelBatch
from deepinfer_core.engine import speculation_plan

WINDOW = 8
"""Of the tiny models' draft caches."""


@pytest.fixture(scope="module")
def dspark_v4(tmp_path_factory: pytest.TempPathFactory) -> V4:
    return dspark(tmp_path_factory.mktemp("dspark"))


@pytest.fixture(scope="module")
def mtp_v4(tmp_path_factory: pytest.TempPathFactory) -> V4:
    return mtp(tmp_path_factory.mktemp("mtp"))


def now_and_then(monkeypatch: pytest.MonkeyPatch, rng: random.Random, limit: int) -> None:
    """Draft for nobody, for a few, for all, as chance will have it; and keep ``limit`` bytes of rows."""

    def drafts(self: ConfidenceSchedule, requests: int, fresh: int) -> int:
        return rng.choice([0, 0, 0, 1, 2, requests])

    monkeypatch.setattr(ConfidenceSchedule, "drafts", drafts)
    monkeypatch.setattr(speculation_plan, "ASKED_EACH", 1)
    for module in (drafters, mtp_drafter):
        monkeypatch.setattr(module, "WaitingRows", lambda: WaitingRows(limit, least=8))


def check(
    v4: V4,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
    ahead: bool,
    prefixes: bool,
    limit: int,
    seed: int | None = None,
) -> None:
    seed = random.randrange(10**6) if seed is None else seed
    print(f"seed {seed}")
    rng = random.Random(seed)
    now_and_then(monkeypatch, rng, limit)
    groups: dict[str, Any] = {
        "scheduling": {"max_batch_tokens": 20, "async_scheduling": ahead, "max_running": 5},
        "kv_cache": {"prefix_cache": prefixes, "num_blocks": 24},
        "speculation": {"schedule": "confidence"},
        "plugins": {"spec_decode": {"cost_cache": "off"}},
    }
    depth = 3 if method == "mtp" else BLOCK
    with open_llm(v4.path, method, depth=depth, **groups) as llm:
        made = recorded(llm)
        texts = []
        for _ in range(2):
            prompts = [*PROMPTS[1:], random_tokens(rng.randrange(10**6), 40)]
            params = SamplingParams(temperature=0, max_tokens=14)
            outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
            texts += [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
        assert llm.engine.core.speculator.failures == 0  # type: ignore[union-attr]
    real = [m for m in made if any(t[: len(m.past)] == m.past for t in texts)]
    assert len(real) > 20
    for m in rng.sample(real, 12):
        if method == "mtp":
            assert m.tokens[0] == v4.next_token(m.past), len(m.past)
        else:
            drafts, logits = v4.block(m.past)
            assert m.tokens == drafts, len(m.past)
            assert_confident(m.confidence, logits)


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("prefixes", "limit"), [(True, 10**9), (False, 10**9), (False, 20000), (True, 0)])
def test_blocks_after_pauses_are_those_of_the_module(
    dspark_v4: V4, monkeypatch: pytest.MonkeyPatch, ahead: bool, prefixes: bool, limit: int
) -> None:
    """With prefix hits, slid windows, preemption-sized pools and rows absorbed because too many wait."""
    check(dspark_v4, "dspark", monkeypatch, ahead, prefixes, limit)


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("prefixes", [False, True])
def test_next_tokens_after_pauses_are_those_of_the_module(
    mtp_v4: V4, monkeypatch: pytest.MonkeyPatch, ahead: bool, prefixes: bool
) -> None:
    check(mtp_v4, "mtp", monkeypatch, ahead, prefixes, 10**9)


def test_the_last_row_sees_its_whole_window_when_the_next_step_is_planned(
    mtp_v4: V4, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft after 24 tokens sees the last row of a block that the step after it, planned before, does without."""
    check(mtp_v4, "mtp", monkeypatch, True, False, 10**9, seed=909089)


def counted(module: Any) -> tuple[list[int], list[int]]:
    """Rows of each injection, and requests of each forward pass, from now on."""
    injected: list[int] = []
    forward: list[int] = []
    inject, run = module.inject, module.forward

    def count_rows(taps: Any, batch: ModelBatch, plan: Any) -> None:
        injected.append(len(batch.positions))
        inject(taps, batch, plan)

    def count_requests(batch: ModelBatch, plan: Any) -> torch.Tensor:
        forward.append(len(batch.token_ids) // BLOCK)
        hidden: torch.Tensor = run(batch, plan)
        return hidden

    module.inject, module.forward = count_rows, count_requests
    return injected, forward


@pytest.mark.parametrize("prefixes", [False, True])
def test_a_stopped_drafter_does_nothing_but_probes(
    dspark_v4: V4, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, prefixes: bool
) -> None:
    """Counted, not timed: forward passes of the module, rows injected, drafts verified, in 12 requests' 480 tokens."""
    monkeypatch.setattr(ConfidenceSchedule, "_pays", lambda self, requests: False)
    monkeypatch.setattr(schedule, "PROBE_SHARE", 1e9)  # as often as ``probe_steps`` allows, whatever drafting costs
    groups: dict[str, Any] = {
        "scheduling": {"max_running": 12, "max_batch_tokens": 512},
        "kv_cache": {"prefix_cache": prefixes},
        "speculation": {"schedule": "confidence"},
        "plugins": {"spec_decode": {"cost_cache": str(tmp_path), "probe_steps": 10}},
    }
    with open_llm(dspark_v4.path, "dspark", **groups) as llm:
        module: Any = llm.engine.core.speculator.drafter._module  # type: ignore[union-attr]
        injected, forward = counted(module)
        planner = llm.engine.core.planner
        before = planner.steps
        prompts = [{"prompt_token_ids": random_tokens(n, 20 + n)} for n in range(12)]
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40))
        steps = planner.steps - before
    first = -(-ENOUGH // PROBED)
    assert set(forward) == {PROBED}
    assert 2 < len(forward) <= first + steps // 10 + 1
    # Each probe absorbs what its own requests have, and of a sequence no more than its window's blocks.
    assert len(injected) == len(forward)
    assert max(injected[2:]) <= PROBED * (WINDOW + 2 * 16 + BLOCK)
    assert sum(injected) < 0.5 * (steps * 12 + 12 * 25)


def test_steps_without_drafts_keep_few_objects(dspark_v4: V4, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fewer than make the garbage collector begin: in an engine that keeps none it never has to, and what it goes
    through in the end are all objects of the process."""
    monkeypatch.setattr(ConfidenceSchedule, "drafts", lambda self, requests, fresh: 0)
    groups: dict[str, Any] = {
        "scheduling": {"max_running": 8},
        "speculation": {"schedule": "confidence"},
        "plugins": {"spec_decode": {"cost_cache": str(tmp_path)}},
    }
    with open_llm(dspark_v4.path, "dspark", **groups) as llm:
        drafting: Any = llm.engine.core.runner.drafting
        after, kept = drafting.after, []

        def counted_after(ran: Any) -> Any:
            kept.append(gc.get_count()[0])
            return after(ran)

        drafting.after = counted_after
        gc.collect()
        gc.disable()
        try:
            prompts = [{"prompt_token_ids": random_tokens(n, 5 + n)} for n in range(8)]
            llm.generate(prompts, SamplingParams(temperature=0, max_tokens=80))
        finally:
            gc.enable()
    steps = kept[10:]
    assert len(steps) > 60
    assert max(max(steps[i : i + 33]) - steps[i] for i in range(len(steps) - 33)) < gc.get_threshold()[0]
