"""DSpark, DFlash and MTP of a tiny DeepSeek-V4, in the engine: drafts are the module's, output is the target's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from toys.drafters import assert_same
from v4.support import random_tokens
from v4_drafters import BLOCK, V4, assert_confident, dspark, mtp

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.api import ConfigError, DraftStep, Proposal

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@attrs.frozen
class Made:
    """One row of a proposal: the tokens up to the newest, the drafts, the confidence."""

    past: list[int]
    tokens: list[int]
    confidence: list[float]


def open_llm(path: Path, method: str = "", depth: int = BLOCK, **groups: Any) -> LLM:
    settings: dict[str, Any] = {"kv_cache": {"block_size": 16}, "logging": {"progress": False, "level": "error"}}
    for name, group in groups.items():
        settings[name] = {**settings.get(name, {}), **group}
    if method:
        settings["speculation"] = {"method": method, "max_draft_tokens": depth, **settings.get("speculation", {})}
    return LLM(path, accelerator="cpu", **settings)


def recorded(llm: LLM) -> list[Made]:
    """Everything the drafter proposes from now on."""
    drafter: Any = llm.engine.core.speculator.drafter  # type: ignore[union-attr]
    made: list[Made] = []
    inner = drafter.propose

    def propose(step: DraftStep) -> Proposal:
        rows = [step.state.history[step.slots[i], : int(a) + 1].tolist() for i, a in enumerate(step.host_anchors)]
        proposal: Proposal = inner(step)
        assert proposal.confidence is not None
        for row, tokens, said in zip(rows, proposal.tokens.tolist(), proposal.confidence.tolist(), strict=True):
            made.append(Made(row, tokens, said))
        return proposal

    drafter.propose = propose
    return made


@pytest.fixture(scope="module")
def dspark_v4(tmp_path_factory: pytest.TempPathFactory) -> V4:
    return dspark(tmp_path_factory.mktemp("dspark"))


@pytest.fixture(scope="module")
def dflash_v4(tmp_path_factory: pytest.TempPathFactory) -> V4:
    return dspark(tmp_path_factory.mktemp("dflash"), heads=False)


@pytest.fixture(scope="module")
def mtp_v4(tmp_path_factory: pytest.TempPathFactory) -> V4:
    return mtp(tmp_path_factory.mktemp("mtp"))


@pytest.fixture(scope="module")
def plain(dspark_v4: V4) -> Iterator[LLM]:
    """The target of all three alone: their main models are the same."""
    with open_llm(dspark_v4.path) as llm:
        yield llm


PROMPTS = [random_tokens(100 + n, n) for n in (1, 3, 8, 9, 15, 16, 17, 25)]


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_drafts_are_those_of_the_module(dspark_v4: V4, ahead: bool) -> None:
    """Prompts in chunks, batches, rejected drafts between: each block is what the oracle makes of the accepted text."""
    scheduling = {"max_batch_tokens": 20, "async_scheduling": ahead}
    with open_llm(dspark_v4.path, "dspark", scheduling=scheduling) as llm:
        made = recorded(llm)
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], GREEDY)
    texts = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
    real = [m for m in made if any(t[: len(m.past)] == m.past for t in texts)]
    assert len(real) > 40
    for m in random.Random(3).sample(real, 16):
        drafts, logits = dspark_v4.block(m.past)
        assert m.tokens == drafts, len(m.past)
        assert_confident(m.confidence, logits)


def test_drafts_without_heads(dflash_v4: V4) -> None:
    with open_llm(dflash_v4.path, "dspark") as llm:
        made = recorded(llm)
        llm.generate([{"prompt_token_ids": PROMPTS[4]}], GREEDY)
    for m in made[:4]:
        assert m.tokens == dflash_v4.block(m.past)[0]


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_the_first_draft_is_that_of_the_next_token_module(mtp_v4: V4, ahead: bool) -> None:
    scheduling = {"max_batch_tokens": 20, "async_scheduling": ahead}
    with open_llm(mtp_v4.path, "mtp", depth=3, scheduling=scheduling) as llm:
        made = recorded(llm)
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS[1:]], GREEDY)
    texts = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
    real = [m for m in made if any(t[: len(m.past)] == m.past for t in texts)]
    assert len(real) > 40
    for m in random.Random(4).sample(real, 16):
        assert m.tokens[0] == mtp_v4.next_token(m.past), len(m.past)


def test_drafts_after_a_prefix_hit_are_those_of_a_cold_start(dspark_v4: V4) -> None:
    """Draft rows lie under the same block hash as the target's."""
    prompt = random_tokens(9, 40)
    with open_llm(dspark_v4.path, "dspark") as llm:
        made = recorded(llm)
        first = llm.generate([{"prompt_token_ids": prompt}], GREEDY)[0]
        cold = list(made)
        made.clear()
        again = llm.generate([{"prompt_token_ids": prompt}], GREEDY)[0]
        assert again.metrics.cached_tokens == 32
        assert [m.tokens for m in made] == [m.tokens for m in cold]
        assert again.outputs[0].token_ids == first.outputs[0].token_ids


def mixed(rng: random.Random, count: int) -> tuple[list[Any], list[SamplingParams]]:
    prompts = [{"prompt_token_ids": random_tokens(rng.randrange(10**6), rng.randrange(1, 30))} for _ in range(count)]
    params = []
    for _ in range(count):
        options: dict[str, Any] = {"max_tokens": rng.randrange(4, 16), "seed": rng.randrange(99)}
        options["temperature"] = rng.choice([0.0, 0.0, 0.8])
        if rng.random() < 0.3:
            options["presence_penalty"] = 0.7
        if rng.random() < 0.3:
            options["top_p"] = 0.8
        params.append(SamplingParams(**options))
    return prompts, params


CASES = {
    "dspark fixed": ("dspark", {}),
    "dspark by confidence": ("dspark", {"schedule": "confidence"}),
    "dspark 1": ("dspark", {"max_draft_tokens": 1}),
    "dspark 3": ("dspark", {"max_draft_tokens": 3}),
    "dflash": ("dflash", {}),
    "mtp 1": ("mtp", {"max_draft_tokens": 1}),
    "mtp 7": ("mtp", {"max_draft_tokens": 7}),
}


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("case", CASES)
def test_output_is_that_of_the_target(
    request: pytest.FixtureRequest, plain: LLM, tmp_path: Path, case: str, ahead: bool
) -> None:
    """Alone and with strangers, in small pools, with prefixes shared between rounds."""
    kind, speculation = CASES[case]
    v4: V4 = request.getfixturevalue(f"{kind}_v4")
    method = "mtp" if kind == "mtp" else "dspark"
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    groups = {
        "scheduling": {"async_scheduling": ahead, "max_batch_tokens": 48, "max_running": 6},
        "kv_cache": {"num_blocks": 12},
        "plugins": {"spec_decode": {"cost_cache": str(tmp_path)}},
    }
    with open_llm(v4.path, method, speculation=speculation, **groups) as llm:
        for count in (1, 9):
            prompts, params = mixed(rng, count)
            expected = plain.generate(prompts, params)
            for _ in range(2):
                assert_same(llm.generate(prompts, params), expected, 1e-4)
        assert llm.engine.core.speculator.failures == 0  # type: ignore[union-attr]
        assert not llm.engine.core.planner.slots.slack.any()


def test_what_does_not_fit_is_one_error_at_start(dspark_v4: V4, mtp_v4: V4, dflash_v4: V4, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kind 'mtp' was asked for, the checkpoint has 3 of kind 'dspark'"):
        open_llm(dspark_v4.path, "mtp")
    with pytest.raises(ConfigError, match=r"max_draft_tokens=6: draft module DeepseekV4DSpark drafts 5 at once"):
        open_llm(dspark_v4.path, "dspark", depth=6)
    with pytest.raises(ConfigError, match=r"max_draft_tokens=8: cache group 'draft' has a window of 8 tokens"):
        open_llm(mtp_v4.path, "mtp", depth=8)
