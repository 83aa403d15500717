"""demo-v4 whose operators keep every row's bits: the very same tokens with every drafter, on the host and on a GPU.

Greedy and seeded requests share their steps. On a GPU, where what a drafter reads back may not be there yet, this is
what shows that it is.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch

from deepinfer_core import LLM, RequestOutput, SamplingParams

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepinfer_demo_v4") is None
    or importlib.util.find_spec("deepinfer_batch_invariance") is None,
    reason="demo-v4 or the batch_invariance plugin is not installed",
)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU of the CUDA kind")
ACCELERATORS = ["cpu", pytest.param("nvidia_sm100", marks=[pytest.mark.gpu, on_gpu])]
DRAFTERS: Mapping[str, tuple[str, str]] = {
    "dspark": ("dspark", "demo-v4-dspark"),
    "dflash": ("dspark", "demo-v4-dflash"),
    "mtp": ("mtp", "demo-v4-mtp"),
    "ngram": ("ngram", ""),
}
PROMPTS = [
    "def load(path):\n    with open(path) as file:\n        return",
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def put(self, item):\n",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    '{"name": "a", "value": 1}\n{"name": "b", "value": 2}\n{"name": "c",',
]
TOKENS = 24


def requests(count: int) -> tuple[list[str], list[SamplingParams]]:
    """Prompts and their parameters: of each two one is greedy and one has a seed."""
    prompts = [f"# {i // len(PROMPTS)}\n" * (i >= len(PROMPTS)) + PROMPTS[i % len(PROMPTS)] for i in range(count)]
    params = [
        SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0)
        if i % 2
        else SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.9, seed=i, presence_penalty=0.3)
        for i in range(count)
    ]
    return prompts, params


def open_llm(accelerator: str, **groups: Any) -> LLM:
    config = {"model": {"max_model_len": 256}, "kv_cache": {"num_blocks": 257}, "features": {"batch_invariant": True}}
    return LLM(
        "demo-v4", accelerator=accelerator, config=config, logging={"progress": False, "level": "error"}, **groups
    )


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@cache
def plain(accelerator: str) -> tuple[list[list[int]], list[list[int]]]:
    """What 4 and 16 requests say without a drafter."""
    with open_llm(accelerator) as llm:
        few, many = (tokens(llm.generate(*requests(count))) for count in (4, 16))
    return few, many


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
@pytest.mark.parametrize("schedule", ["fixed", pytest.param("confidence", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "drafter", ["dspark", *(pytest.param(d, marks=pytest.mark.slow) for d in ("dflash", "mtp", "ngram"))]
)
@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_tokens_are_those_without_drafts(accelerator: str, drafter: str, schedule: str, ahead: bool) -> None:
    method, module = DRAFTERS[drafter]
    groups = {
        "speculation": {"method": method, "schedule": schedule},
        "plugins": {"spec_decode": {"drafter": module, "cost_cache": "off"}},
        "scheduling": {"async_scheduling": ahead},
    }
    few, many = plain(accelerator)
    with open_llm(accelerator, **groups) as llm:
        assert tokens(llm.generate(*requests(4))) == few
        assert tokens(llm.generate(*requests(16))) == many
        speculator = llm.engine.core.speculator
        assert speculator is not None
        assert speculator.failures == 0
        if schedule == "fixed":
            assert speculator.accepted > 60
