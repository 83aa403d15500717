"""DSpark and DFlash for Qwen3 in DeepSpec's format: parity with a float64 formula, and output that is the target's."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from qwen3_drafters import BLOCK, Qwen3Drafter, write_drafter, write_target
from test_deepseek_v4 import open_llm, recorded
from toys.drafters import assert_same

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.api import CheckpointError, ConfigError

GREEDY = SamplingParams(temperature=0, max_tokens=12)
KINDS = {
    "dspark": {},
    "untied confidence": {"tied": False},
    "dflash": {"rank": 0, "confidence": False, "tied": False},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    root = tmp_path_factory.mktemp("qwen3")
    return root, write_target(root)


@pytest.fixture(scope="module")
def drafters(target: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Qwen3Drafter]:
    root = tmp_path_factory.mktemp("drafters")
    return {kind: write_drafter(root / kind.replace(" ", "_"), target[1], **more) for kind, more in KINDS.items()}  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plain(target: tuple[Path, Any]) -> Iterator[LLM]:
    with open_llm(target[0]) as llm:
        yield llm


def with_drafter(target: Path, drafter: Qwen3Drafter, depth: int = BLOCK, **groups: Any) -> LLM:
    plugins = {"spec_decode": {"drafter": str(drafter.path), **groups.pop("spec_decode", {})}}
    return open_llm(target, "dspark", depth, plugins=plugins, **groups)


def random_prompts(rng: random.Random, count: int, longest: int = 40) -> list[Any]:
    return [{"prompt_token_ids": [rng.randrange(95) for _ in range(rng.randrange(1, longest))]} for _ in range(count)]


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_formula(
    target: tuple[Path, Any], drafters: dict[str, Qwen3Drafter], kind: str, ahead: bool
) -> None:
    rng, drafter = random.Random(1), drafters[kind]
    scheduling = {"max_batch_tokens": 30, "async_scheduling": ahead}
    with with_drafter(target[0], drafter, scheduling=scheduling) as llm:
        made = recorded(llm)
        outputs = llm.generate(random_prompts(rng, 6), GREEDY)
    texts = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
    real = [m for m in made if len(m.past) > 1 and any(t[: len(m.past)] == m.past for t in texts)]
    assert len(real) > 30
    for m in rng.sample(real, 12):
        _, drafts, confidence = drafter.block(m.past)
        assert m.tokens == drafts, len(m.past)
        if drafter.confidence:
            assert m.confidence == pytest.approx(torch.tensor(confidence).sigmoid().tolist(), abs=1e-3)


def test_base_logits(target: tuple[Path, Any], drafters: dict[str, Qwen3Drafter]) -> None:
    """Before the Markov head, at every row of the block."""
    drafter = drafters["dspark"]
    with with_drafter(target[0], drafter) as llm:
        made = recorded(llm)
        module: Any = llm.engine.core.speculator.drafter._module  # type: ignore[union-attr]
        seen: list[torch.Tensor] = []
        inner = module.logits
        module.logits = lambda hidden: seen.append(inner(hidden)) or seen[-1].clone()  # type: ignore[func-returns-value]
        llm.generate(random_prompts(random.Random(2), 1), GREEDY)
    for m, logits in list(zip(made, seen, strict=True))[:4]:
        wanted = drafter.block(m.past)[0]
        assert float((logits.double() - wanted).abs().max()) < 1e-4 * float(wanted.abs().max())


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("case", ["dspark fixed", "dspark confidence", "dflash fixed", "dflash confidence"])
def test_output_is_that_of_the_target(
    target: tuple[Path, Any], drafters: dict[str, Qwen3Drafter], plain: LLM, tmp_path: Path, case: str, ahead: bool
) -> None:
    kind, schedule = case.split()
    rng = random.Random(random.randrange(10**6))
    groups: dict[str, Any] = {
        "scheduling": {"async_scheduling": ahead, "max_batch_tokens": 60, "max_running": 6},
        "kv_cache": {"num_blocks": 18},
        "spec_decode": {"cost_cache": str(tmp_path)},
        "speculation": {"schedule": schedule},
    }
    with with_drafter(target[0], drafters[kind], rng.choice([1, 4, 7]), **groups) as llm:
        for count in (1, 10):
            prompts = random_prompts(rng, count, 30)
            params = [
                SamplingParams(
                    temperature=rng.choice([0, 0.7]), seed=i, max_tokens=14, presence_penalty=rng.choice([0, 0.5])
                )
                for i in range(count)
            ]
            assert_same(llm.generate(prompts, params), plain.generate(prompts, params), 1e-4)
        assert llm.engine.core.speculator.failures == 0  # type: ignore[union-attr]


def changed(drafter: Qwen3Drafter, path: Path, **fields: Any) -> Path:
    path.mkdir()
    config = json.loads((drafter.path / "config.json").read_text(encoding="utf-8")) | fields
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (path / "model.safetensors").symlink_to(drafter.path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 100}, r"^plugins\.spec_decode\.drafter = .* has vocab_size=100, the target 96:"),
        ({"target_layer_ids": [1, 9]}, r"reads layers \[1, 9\] of its target, which has 4"),
        ({"markov_head_type": "gated"}, "markov_head_type='gated': expected 'vanilla'"),
        ({"max_position_embeddings": 64}, "it supports 64 tokens, the target is set to 128"),
        ({"mask_token_id": 96}, "mask_token_id=96: expected a token id below 96"),
    ],
)
def test_what_does_not_fit(
    target: tuple[Path, Any], drafters: dict[str, Qwen3Drafter], tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    path = changed(drafters["dspark"], tmp_path / "drafter", **fields)
    with pytest.raises(ConfigError, match=message):
        open_llm(target[0], "dspark", 4, plugins={"spec_decode": {"drafter": str(path)}})


def test_a_target_without_such_a_module(target: tuple[Path, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"method='mtp': no such module for \['Qwen3ForCausalLM'\]"):
        open_llm(target[0], "mtp")
    with pytest.raises(ConfigError, match=r"set plugins\.spec_decode\.drafter"):
        open_llm(target[0], "dspark")
    with pytest.raises(ConfigError, match=r"set plugins\.spec_decode\.draft_model"):
        open_llm(target[0], "draft_model")
    with pytest.raises(
        CheckpointError,
        match=r"^plugins\.spec_decode\.draft_model = '/no/such', for speculation\.method = 'draft_model': /no/such: no",
    ):
        open_llm(target[0], "draft_model", plugins={"spec_decode": {"draft_model": "/no/such"}})
