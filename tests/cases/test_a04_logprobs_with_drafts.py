"""A04 (ggml-org/llama.cpp#27972): log-probabilities with speculation are those of the target, one entry per token."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from toys.checkpoints import ToyLLM, open_toy
from toys.checks import assert_clean
from toys.drafters import Twins, drafter_of, drafting
from toys.oracle import HashOracle, const_logits, log_softmax
from transformers import LlamaConfig, LlamaForCausalLM

from deepinfer_core import LLM, SamplingParams

CONST = log_softmax(const_logits({3: 2.0, 5: 1.9, 7: 0.2}, 16))
ACCEPTED = [0, 2, 99]
SEED = random.randrange(2**31)


def draft_threes(llm: LLM, right: int) -> None:
    """CONST's greedy token is 3; after ``right`` of them the drafts say 5."""
    drafter = drafter_of(llm)
    drafter.tokens = (  # type: ignore[method-assign]
        lambda row: [3 if i < right else 5 for i in range(4)] if row.request_id != "1" else []
    )


@pytest.mark.parametrize("right", ACCEPTED)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_const(toy_llm: ToyLLM, right: int, temperature: float) -> None:
    """Every entry is the same closed form, bit for bit; one request of the three has no drafts."""
    llm = toy_llm("Const", **drafting("toy"))
    draft_threes(llm, right)
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=14, logprobs=3)
    outputs = llm.generate([[1]] * 3, params)
    entries = [entry for o in outputs for entry in o.outputs[0].logprobs or ()]
    assert len(entries) == 3 * 14
    for entry in entries:
        assert list(entry)[:3] == [3, 5, 7]
        assert [entry[i].rank for i in (3, 5, 7)] == [1, 2, 3]
        assert math.isclose(entry[3].logprob - entry[5].logprob, 0.1, abs_tol=1e-6)
        assert entry[3] == entries[0][3]
        for token, listed in entry.items():
            assert math.isclose(listed.logprob, CONST[token], abs_tol=1e-5)
            assert listed.logprob < 0.0
    for output in outputs:
        for token, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs or (), strict=True):
            assert token in entry
    heard = drafter_of(llm).heard
    assert {v.request_id for v in heard} == {"0", "2"}
    if temperature == 0:
        assert {v.accepted for v in heard if v.proposed == 4} == {min(right, 4)}
    assert_clean(llm)


@pytest.mark.parametrize("right", ACCEPTED)
@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_values_are_those_of_each_row(toy_llm: ToyLLM, right: int, mode: Any) -> None:
    """PREFIXHASH: each position has its own logits. Raw is before penalties and temperature, processed after."""
    llm = toy_llm("PrefixHash", **drafting("toy", right=right, depth=5))
    twins, oracle = Twins(toy_llm("PrefixHash"), llm), HashOracle(64, [None])
    options: dict[str, Any] = {"temperature": 0.5, "seed": 2, "presence_penalty": 1.0, "max_tokens": 20}
    prompts = [[i] * (i + 1) for i in range(4)]
    outputs = twins.generate(prompts, SamplingParams(logprobs=2, logprobs_mode=mode, **options))
    for prompt, output in zip(prompts, outputs, strict=True):
        known = list(prompt)
        assert output.outputs[0].logprobs is not None
        for token, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
            logits = oracle.logits(known).astype("float64")
            if mode == "processed":
                logits[sorted(set(known[len(prompt) :]))] -= 1.0
                logits /= 0.5
            expected = log_softmax(logits)
            assert {int(i) for i in expected.argsort()[-2:]} <= entry.keys()
            assert token in entry
            for listed, value in entry.items():
                assert math.isclose(value.logprob, expected[listed], abs_tol=5e-5)
            known.append(token)
    assert_clean(llm)


def test_a_certain_token_has_zero(toy_llm: ToyLLM) -> None:
    """0.0 is right where nothing else is allowed, and only there."""
    llm = toy_llm("Const", **drafting("toy"))
    draft_threes(llm, 99)
    params = SamplingParams(temperature=0, max_tokens=9, logprobs=0, logprobs_mode="processed", allowed_token_ids=[3])
    (output,) = llm.generate([[1]], params)
    assert [entry[3].logprob for entry in output.outputs[0].logprobs or ()] == [0.0] * 9


# ---- a small model with random weights


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=64,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        print(f"weights from seed {SEED}")
        torch.manual_seed(SEED)
        LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def llamas(checkpoint: Path) -> Iterator[Twins]:
    with open_toy(checkpoint) as plain, open_toy(checkpoint, **drafting("toy")) as drafted:
        yield Twins(plain, drafted)


@pytest.mark.parametrize("right", ACCEPTED)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_small_model(checkpoint: Path, llamas: Twins, right: int, temperature: float) -> None:
    """Against transformers, over the whole text at once."""
    drafter = drafter_of(llamas.drafting)
    drafter.settings = attrs.evolve(drafter.settings, right=right)
    theirs = LlamaForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
    prompts = [[i + 3] * (i + 1) for i in range(5)]
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=16, logprobs=3)
    for prompt, output in zip(prompts, llamas.generate(prompts, params), strict=True):
        ids = output.outputs[0].token_ids
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt + ids])).logits[0].double().log_softmax(-1)
        assert len(output.outputs[0].logprobs or ()) == 16
        for i, entry in enumerate(output.outputs[0].logprobs or ()):
            assert ids[i] in entry
            assert 3 <= len(entry) <= 4
            for token, value in entry.items():
                assert math.isclose(value.logprob, float(expected[len(prompt) - 1 + i, token]), abs_tol=5e-5)
    assert_clean(llamas.drafting)
