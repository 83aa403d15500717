"""Drafting on a device whose closures run late: the loop is one step ahead, and nothing that is said changes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from speculating import check_same, drafting, random_params, random_prompts
from toys.checkpoints import toy_settings, write_toy
from toys.distributions import install_into

from deepinfer_core import LLM

FAKE = Path(__file__).parents[1] / "fake_backend"
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "certain drafts": ("told", {"plugins__device_drafters__right": -1}),
    "drawn drafts": ("told", {"plugins__device_drafters__right": -1, "plugins__device_drafters__certain": False}),
    "a module": ("draft_model", {}),
}


@pytest.fixture
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_into(tmp_path / "site", FAKE)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("name", DRAFTERS)
def test_output_is_that_without_drafts(tmp_path: Path, name: str) -> None:
    rng = random.Random(random.randrange(10**6))
    directory = write_toy(tmp_path / "toy", "PrefixHash", groups={"full": None, "near": 6})
    method, more = DRAFTERS[name]
    options: dict[str, Any] = {"fallback": "allow", "kv_cache__num_blocks": 40, "scheduling__max_batch_tokens": 30}
    speculative = {**options, **drafting(method, 4, plugins__spec_decode__draft_model=str(directory), **more)}
    with (
        LLM(directory, accelerator="fake", **toy_settings(**options)) as plain,
        LLM(directory, accelerator="fake", **toy_settings(**speculative)) as fast,
    ):
        assert fast.engine.planned.plan.facts["loop"] == "one step ahead"
        for _ in range(2):
            prompts = random_prompts(rng, 9)
            check_same(plain, fast, prompts, [random_params(rng) for _ in prompts])
        assert fast.engine.core.speculator is not None
        assert fast.engine.core.speculator.accepted > 20
