"""Device drafters over toys whose logits depend on every token reachable through the cache: nothing may change."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from speculating import check_same, drafting, pair, random_params, random_prompts
from toys.checkpoints import open_toy, write_toy
from toys.checks import assert_clean
from toys.device_drafters import TEXTS

from deepinfer_core import SamplingParams

GROUPS: dict[str, dict[str, int | None]] = {
    "full": {"full": None},
    "near": {"near": 6},
    "both": {"full": None, "near": 3},
}
TOLD: dict[str, dict[str, Any]] = {
    "right": {},
    "wrong": {"plugins__device_drafters__right": 0},
    "any": {"plugins__device_drafters__right": -1},
    "drawn": {"plugins__device_drafters__right": -1, "plugins__device_drafters__certain": False},
    "odd schedule": {"plugins__device_drafters__right": -1, "speculation__schedule": "confidence"},
}


def clean(llm: Any) -> None:
    assert_clean(llm)
    assert not llm.engine.core.planner.slots.slack.any()


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("told", TOLD)
def test_any_request(tmp_path: Path, told: str, groups: str, ahead: bool) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    directory = write_toy(tmp_path / "toy", "PrefixHash", groups=GROUPS[groups])
    settings = drafting("told", depth=rng.choice([1, 3, 5, 8]), **TOLD[told])
    options = {"scheduling__max_batch_tokens": rng.choice([13, 64]), "scheduling__async_scheduling": ahead}
    plain, fast = pair(directory, settings, **options)
    for _ in range(2):
        prompts = random_prompts(rng, 9)
        check_same(plain, fast, prompts, [random_params(rng) for _ in prompts])
        clean(fast)
    plain.close()
    fast.close()


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_right_for_exactly_so_many_tokens(tmp_path: Path, temperature: float, ahead: bool) -> None:
    """Depth 1..8, right for 0..depth: alone, and every draft that was verified in full was right for so many."""
    directory = write_toy(tmp_path / "toy", "PrefixHash")
    prompt, params = [3, 1, 4, 1, 5], SamplingParams(temperature=temperature, seed=3, max_tokens=20)
    plain = open_toy(directory)
    (expected,) = plain.generate([prompt], params)
    text = expected.outputs[0].token_ids
    plain.close()
    for depth in (1, 2, 4, 8):
        for right in range(depth + 1):
            more = {"plugins__device_drafters__right": right, "scheduling__async_scheduling": ahead}
            fast = open_toy(directory, **drafting("told", depth=depth, **more))
            TEXTS[:] = [prompt + text]
            (output,) = fast.generate([prompt], params)
            assert output.outputs[0].token_ids == text
            heard = fast.engine.core.speculator.drafter.heard  # type: ignore[union-attr]
            whole = {v.accepted for v in heard if v.proposed == depth}
            assert whole == {right}
            if not ahead:  # every round has drafts, but for one that has a single token left
                assert len(heard) >= -(-(len(text) - 1) // (right + 1)) - 1
            assert output.metrics.accepted_drafts == sum(v.accepted for v in heard)
            clean(fast)
            fast.close()


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_small_pools(tmp_path: Path, prefix_cache: bool, ahead: bool) -> None:
    """Preemption, eviction and chunks, with drafts that are right now and then."""
    rng = random.Random(random.randrange(10**6))
    directory = write_toy(tmp_path / "toy", "PrefixHash", groups={"full": None, "near": 5})
    settings = drafting("told", depth=4, plugins__device_drafters__right=-1)
    options = {
        "kv_cache__num_blocks": 10,
        "kv_cache__prefix_cache": prefix_cache,
        "scheduling__max_running": 6,
        "scheduling__max_batch_tokens": 9,
        "scheduling__async_scheduling": ahead,
    }
    plain, fast = pair(directory, settings, **options)
    for _ in range(3):
        prompts = [[i % 3, *range(rng.randrange(1, 14))] for i in range(12)]
        check_same(plain, fast, prompts, [random_params(rng, 20) for _ in prompts])
        clean(fast)
    assert fast.engine.core.planner.preemption.count > 0
    plain.close()
    fast.close()


@pytest.mark.parametrize("confidence", ["zero", "one", "nan", "random"])
def test_tokens_do_not_depend_on_confidence(tmp_path: Path, confidence: str) -> None:
    """A02: whatever the drafter says of its drafts."""
    rng = random.Random(5)
    directory = write_toy(tmp_path / "toy", "PrefixHash")
    more = {"plugins__device_drafters__confidence": confidence, "speculation__schedule": "confidence"}
    plain, fast = pair(directory, drafting("told", **more))
    prompts = random_prompts(rng, 6)
    check_same(plain, fast, prompts, SamplingParams(temperature=0, max_tokens=16))
    plain.close()
    fast.close()


def test_a_drafter_that_raises_costs_its_drafts(tmp_path: Path) -> None:
    rng = random.Random(6)
    directory = write_toy(tmp_path / "toy", "PrefixHash")
    plain, fast = pair(directory, drafting("told", plugins__device_drafters__every=2))
    prompts = random_prompts(rng, 4)
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = [o.outputs[0].token_ids for o in plain.generate(list(prompts), params)]
    TEXTS[:] = [p + e for p, e in zip(prompts, expected, strict=True)]
    found = fast.generate(list(prompts), params)
    assert [o.outputs[0].token_ids for o in found] == expected
    assert fast.engine.core.speculator.failures > 0  # type: ignore[union-attr]
    assert sum(o.metrics.accepted_drafts for o in found) > 0
    plain.close()
    fast.close()


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("drafter", ["ngram", "same model", "other model"])
def test_shipped_drafters(tmp_path: Path, drafter: str, ahead: bool) -> None:
    rng = random.Random(random.randrange(10**6))
    directory = write_toy(tmp_path / "toy", "PrefixHash", groups={"full": None, "near": 6})
    other = write_toy(tmp_path / "other", "Count")
    path = {"ngram": "", "same model": str(directory), "other model": str(other)}[drafter]
    method = "ngram" if drafter == "ngram" else "draft_model"
    settings = drafting(method, depth=rng.choice([1, 4]), plugins__spec_decode__draft_model=path)
    options = {"scheduling__async_scheduling": ahead, "scheduling__max_batch_tokens": 23}
    plain, fast = pair(directory, settings, **options)
    for _ in range(2):
        prompts = [[*range(5), *rng.choices(range(4), k=9)] for _ in range(6)]
        check_same(plain, fast, prompts, [random_params(rng) for _ in prompts])
        clean(fast)
    plain.close()
    fast.close()


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalties", [{}, {"repetition_penalty": 1.6, "presence_penalty": 0.8}], ids=["", "penalised"])
def test_a_model_that_drafts_for_itself_is_always_right(
    tmp_path: Path, penalties: dict[str, float], temperature: float, ahead: bool
) -> None:
    """So its caches hold what they must: after prompts in chunks, prefix hits, rejections of none, and preemption.

    Penalties count the drafts before a draft."""
    directory = write_toy(tmp_path / "toy", "PrefixHash", groups={"full": None, "near": 6})
    settings = drafting("draft_model", depth=4, plugins__spec_decode__draft_model=str(directory))
    options = {
        "scheduling__async_scheduling": ahead,
        "scheduling__max_batch_tokens": 19,
        "kv_cache__num_blocks": 40,
    }
    plain, fast = pair(directory, settings, **options)
    prompts = [[*range(9), i, *range(i)] for i in range(8)]
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=21, **penalties)
    for _ in range(2):
        check_same(plain, fast, prompts, params)
    speculator = fast.engine.core.speculator
    assert speculator is not None
    assert speculator.accepted == speculator.proposed > 150
    plain.close()
    fast.close()


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_a_draft_that_cannot_be_drawn_costs_one_request_its_drafts(tmp_path: Path, ahead: bool) -> None:
    """The draft model's logits of the first request are NaN: no id below 0 reaches a model, whose embedding has no such
    row, and the others' drafts are as good as ever."""
    directory = write_toy(tmp_path / "toy", "PrefixHash")
    settings = drafting("draft_model", depth=3, plugins__spec_decode__draft_model=str(directory))
    plain, fast = pair(directory, settings, scheduling__async_scheduling=ahead)
    speculator: Any = fast.engine.core.speculator
    model, lowest = speculator.drafter._model, []
    model.before = lambda batch: lowest.append(int(batch.token_ids.min()))
    logits = model.logits

    def partly_nan(hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = logits(hidden)
        found[0] = float("nan")
        return found

    model.logits = partly_nan
    check_same(plain, fast, [[1, 2, 3], [4, 5, 6], [7, 8, 9]], SamplingParams(temperature=0, max_tokens=13))
    assert min(lowest) >= 0
    assert speculator.accepted == speculator.proposed > 12
    plain.close()
    fast.close()
