"""A01: speculation over compressed state is lossless at every width; the drafter is right for exactly j tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from v4 import right_for_drafter
from v4.support import BLOCK, Stepper, random_model, random_tokens

from deepinfer_core import LLM, SamplingParams

PROMPTS = [random_tokens(100 + n, n) for n in range(5, 21)]
OUT, SEED = 24, 11
PARAMS = SamplingParams(max_tokens=OUT, temperature=0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny_v4")
    model = random_model(SEED)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.save_pretrained(path)
    return path


def generate(llm: LLM) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], PARAMS)
    return [output.outputs[0].token_ids for output in outputs]


def open_llm(path: Path, **more: Any) -> LLM:
    cache = {"block_size": BLOCK, "prefix_cache": False}
    return LLM(path, kv_cache=cache, logging={"progress": False}, **more)


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> list[list[int]]:
    with open_llm(checkpoint) as llm:
        return generate(llm)


@pytest.fixture(scope="module")
def speculating(checkpoint: Path, plain: list[list[int]]) -> Iterator[LLM]:
    right_for_drafter.TEXTS[:] = [prompt + out for prompt, out in zip(PROMPTS, plain, strict=True)]
    settings: dict[str, Any] = {"speculation": {"method": "right_for:right_for", "max_draft_tokens": 8}}
    with open_llm(checkpoint, plugins={"paths": ["v4.right_for_drafter"]}, **settings) as llm:
        yield llm


@pytest.mark.parametrize(("depth", "right"), [(g, j) for g in range(1, 9) for j in range(g + 1)])
def test_the_same_tokens_as_without_drafts(speculating: LLM, plain: list[list[int]], depth: int, right: int) -> None:
    plan = right_for_drafter.PLAN
    plan.depth, plan.right, plan.seen = depth, right, []
    assert generate(speculating) == plain
    whole = [accepted for proposed, accepted in plan.seen if proposed == depth]
    assert whole
    assert set(whole) == {right}


def state(stepper: Stepper, length: int) -> dict[str, torch.Tensor]:
    """Everything kept of request 0 that a query from position ``length`` on may read."""
    found = {}
    for group in stepper.spec.cache_groups:
        table = torch.tensor(stepper.full_tables[group.name][0]).long()
        rows = length // group.tokens_per_row
        first = max(0, length - (group.window or length) + 1)
        for index, layer in enumerate(stepper.caches[group.name]):
            for name, tensor in layer.items():
                found[f"{group.name}.{index}.{name}"] = tensor[table].flatten(0, 1)[first:rows]
    return found


@pytest.mark.parametrize("depth", range(1, 9))
def test_state_after_each_step_is_that_of_a_fresh_prefill(checkpoint: Path, depth: int) -> None:
    tokens = random_tokens(3, 44)
    stepper, fresh = Stepper(checkpoint), Stepper(checkpoint)
    stepper.step([(0, tokens[:9], 0)])
    position, right = 9, 0
    while position + depth + 1 < len(tokens):
        wrong = [(t + 1) % 128 for t in tokens[position + 1 + right : position + 1 + depth]]
        stepper.step([(0, [*tokens[position : position + 1 + right], *wrong], position)])
        position += 1 + right
        right = (right + 1) % (depth + 1)
        fresh.step([(0, tokens[:position], 0)])
        wanted = state(fresh, position)
        for name, tensor in state(stepper, position).items():
            assert torch.allclose(tensor, wanted[name], rtol=1e-4, atol=1e-4), (name, position)
