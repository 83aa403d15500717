"""Dense models with drafts: the tokens of the run without them, for every depth, acceptance and block boundary."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from toys.checkpoints import open_toy
from toys.checks import assert_clean, ids_of
from toys.dense import SIZES as TINY
from toys.dense import VOCAB
from toys.drafters import TOLD, Twins, check_drafter, drafter_of, drafting, tell
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from deepinfer_core import LLM, SamplingParams

SEED = random.randrange(2**31)
BLOCK = 4
SIZES = {**TINY, "initializer_range": 0.1}
"""Smaller weights than for parity: the logits stay small enough for float32 to hold the 1e-5 asserted below."""

SLIDING: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}
CLASSES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "qwen3-sliding": (Qwen3ForCausalLM, Qwen3Config, SLIDING),
}
DEPTHS = [(depth, right) for depth in range(1, 9) for right in range(depth + 1)]
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {
        "temperature": 1.0,
        "seed": 7,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.2,
        "top_p": 0.95,
    },
}


def random_prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(f"{SEED} {lengths}")
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


PROMPTS = random_prompts(5, 6, 7, 8)
"""Every remainder by the block size."""


@pytest.fixture(scope="module", params=CLASSES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    print(f"weights from seed {SEED}")
    model_class, config_class, changes = CLASSES[request.param]
    path = tmp_path_factory.mktemp("dense")
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model_class(config_class(**SIZES | changes)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def twins(directory: Path) -> Iterator[Twins]:
    with open_toy(directory) as plain, open_toy(directory, **drafting("toy", vocab=VOCAB)) as drafted:
        yield Twins(plain, drafted)


def settle(llm: LLM, **changes: Any) -> None:
    drafter = drafter_of(llm)
    drafter.settings = attrs.evolve(drafter.settings, **changes)


@pytest.mark.parametrize("kind", PARAMS)
def test_the_same_tokens_as_without_drafts(twins: Twins, kind: str) -> None:
    params = SamplingParams(max_tokens=11, **PARAMS[kind])
    expected = told(twins, params)
    drafter = drafter_of(twins.drafting)
    for depth, right in DEPTHS if kind == "greedy" else DEPTHS[1::3]:
        settle(twins.drafting, depth=depth, right=right)
        before = len(drafter.heard)
        assert ids_of(twins.drafting.generate(PROMPTS, params)) == expected, (depth, right)
        assert {v.accepted for v in drafter.heard[before:] if v.proposed == depth} == {right}
    check_drafter(twins.drafting)
    assert_clean(twins.drafting)


def told(twins: Twins, params: SamplingParams) -> list[list[int]]:
    """The right tokens, which the drafters then know."""
    outputs = twins.plain.generate(PROMPTS, params)
    TOLD.clear()
    tell(outputs)
    return ids_of(outputs)


@pytest.mark.parametrize("right", [0, 3, 99])
def test_log_probabilities(twins: Twins, right: int) -> None:
    settle(twins.drafting, depth=6, right=right)
    twins.generate(PROMPTS, SamplingParams(max_tokens=12, logprobs=4, prompt_logprobs=2, temperature=0))


@pytest.mark.parametrize("right", [0, 2, 99])
def test_hits_on_what_was_speculated_equal_cold(directory: Path, right: int) -> None:
    """Requests that go on from each token of a speculated text, at every block boundary, with and without a cache."""
    (prompt,), params = random_prompts(6), SamplingParams(temperature=0, max_tokens=5, logprobs=2)
    with open_toy(directory, kv_cache__prefix_cache=False) as cold:
        (first,) = cold.generate([prompt], SamplingParams(temperature=0, max_tokens=20))
        text = prompt + first.outputs[0].token_ids
        longer = [[*text[:cut], (text[cut] + 1) % VOCAB] for cut in range(7, 26)]
        expected = [cold.generate([p], params)[0] for p in longer]
    with open_toy(directory, **drafting("toy", vocab=VOCAB, depth=7, right=right)) as llm:
        TOLD["0", 0] = text
        assert llm.generate([prompt], SamplingParams(temperature=0, max_tokens=20))[0].outputs == first.outputs
        outputs = [llm.generate([p], params)[0] for p in longer]
        check_drafter(llm)
        assert_clean(llm)
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
        pairs = zip(output.outputs[0].logprobs or (), wanted.outputs[0].logprobs or (), strict=True)
        assert all(abs(a[t].logprob - b[t].logprob) < 1e-5 for a, b in pairs for t in a)
    assert max(output.metrics.cached_tokens for output in outputs) >= 20


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("right", [1, 99])
def test_preempted_in_a_tiny_pool(directory: Path, twins: Twins, kind: str, right: int) -> None:
    params = SamplingParams(max_tokens=16, **PARAMS[kind])
    expected = told(twins, params)
    with open_toy(directory, kv_cache__num_blocks=9, **drafting("toy", vocab=VOCAB, right=right)) as llm:
        outputs = llm.generate(PROMPTS, params)
        assert ids_of(outputs) == expected
        assert sum(output.metrics.preemptions for output in outputs) > 0
        check_drafter(llm)
        assert_clean(llm)
