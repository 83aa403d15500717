"""A whole engine on the host's operators says what it says on the reference's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deepinfer_core import LLM, RequestOutput, SamplingParams

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB, LAYERS = 64, 96, 4, 2, 32, 300, 3
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "max_position_embeddings": 256,
    "use_sliding_window": True,
    "sliding_window": 12,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "torch_dtype": "float32",
}
OPERATORS = (
    "gemm.linear",
    "attention.paged",
    "attention.write_kv",
    "pointwise.rms_norm",
    "pointwise.rope",
    "pointwise.swiglu",
    "sampling.stage",
    "runner.input_ids",
    "runner.slot_mapping",
    "runner.append_tokens",
)
PROMPTS = [[(7 * i + j * j) % VOCAB for j in range(length)] for i, length in enumerate((1, 3, 40, 9, 70, 17))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    def near_one(size: int) -> torch.Tensor:
        return 1 + normal(size)

    tensors = {"model.embed_tokens.weight": normal(VOCAB, HIDDEN), "lm_head.weight": normal(VOCAB, HIDDEN)}
    tensors["model.norm.weight"] = near_one(HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = near_one(HIDDEN)
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = normal(rows * DIM, HIDDEN)
        tensors[f"{prefix}self_attn.o_proj.weight"] = normal(HIDDEN, HEADS * DIM)
        for name in ("q_norm", "k_norm"):
            tensors[f"{prefix}self_attn.{name}.weight"] = near_one(DIM)
        for name, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            tensors[f"{prefix}mlp.{name}_proj.weight"] = normal(*shape)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, directory / "model.safetensors")
    return directory


def engine(checkpoint: Path, ops: dict[str, list[str]]) -> LLM:
    settings: dict[str, Any] = {
        "kv_cache.block_size": 4,
        "kv_cache.num_blocks": 200,
        "scheduling.max_batch_tokens": 48,  # long prompts are cut, and run beside decoding ones
        "logging.progress": False,
        "ops": ops,
    }
    return LLM(checkpoint, accelerator="cpu", **settings)


@pytest.fixture(scope="module")
def host(checkpoint: Path) -> Iterator[LLM]:
    with engine(checkpoint, {}) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Iterator[LLM]:
    with engine(checkpoint, {op: ["reference"] for op in OPERATORS}) as llm:
        yield llm


def chosen(llm: LLM) -> dict[str, str]:
    return {choice["slot"]: choice["provider"] for choice in llm.explain()["plan"]["choices"]}


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    assert all(output.error is None for output in outputs)
    return [completion.token_ids for output in outputs for completion in output.outputs]


def test_the_two_engines_run_on_different_operators(host: LLM, reference: LLM) -> None:
    ours, theirs = chosen(host), chosen(reference)
    for slot in ("qkv", "head", "attention_full", "attention_window", "norm", "sampling_draw", "input_ids"):
        assert ours[slot].startswith("cpu:")
        assert theirs[slot].startswith("reference:")
    assert ours["attention_inputs_full"] == "cpu:attention_inputs"
    assert theirs["rope"].startswith("reference:")


def test_greedy_tokens_are_equal(host: LLM, reference: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    found = tokens(host.generate(PROMPTS, params))
    assert found == tokens(reference.generate(PROMPTS, params))
    assert len({tuple(ids) for ids in found}) == len(PROMPTS)


@pytest.mark.parametrize("filters", [{}, {"top_k": 20}, {"top_p": 0.8}, {"top_k": 50, "top_p": 0.9, "min_p": 0.01}])
def test_seeded_tokens_are_equal(host: LLM, reference: LLM, filters: dict[str, Any]) -> None:
    params = [
        SamplingParams(temperature=0.8, seed=seed, n=2, max_tokens=12, ignore_eos=True, **filters)
        for seed in range(len(PROMPTS))
    ]
    assert tokens(host.generate(PROMPTS, params)) == tokens(reference.generate(PROMPTS, params))


def test_log_probabilities_are_close(host: LLM, reference: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=5, prompt_logprobs=2, ignore_eos=True)
    for ours, theirs in zip(host.generate(PROMPTS, params), reference.generate(PROMPTS, params), strict=True):
        assert ours.prompt_logprobs is not None
        assert theirs.prompt_logprobs is not None
        rows = zip(
            [*ours.prompt_logprobs[1:], *(ours.outputs[0].logprobs or [])],
            [*theirs.prompt_logprobs[1:], *(theirs.outputs[0].logprobs or [])],
            strict=True,
        )
        for found, expected in rows:
            assert found is not None
            assert expected is not None
            assert {i: e.rank for i, e in found.items()} == {i: e.rank for i, e in expected.items()}
            for token, entry in found.items():
                assert entry.logprob == pytest.approx(expected[token].logprob, abs=1e-4)


def test_a_request_says_the_same_alone_and_beside_others(host: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    together = tokens(host.generate(PROMPTS, params))
    for prompt, expected in zip(PROMPTS, together, strict=True):
        assert tokens(host.generate([prompt], params)) == [expected]


def test_eight_bit_weights_are_used_and_named_when_asked_for(checkpoint: Path, host: LLM) -> None:
    slots = ("qkv", "attention_out", "gate_up", "down")
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with engine(checkpoint, {slot: ["cpu:int8_weight_only"] for slot in slots}) as llm:
        names = chosen(llm)
        rounded, exact = (e.generate(PROMPTS[4:5], params)[0].prompt_logprobs for e in (llm, host))
    assert {names[slot] for slot in slots} == {"cpu:int8_weight_only"}
    assert names["head"] == "cpu:packed_linear"
    assert rounded is not None
    assert exact is not None
    differences = [
        abs(a[token].logprob - b[token].logprob)
        for a, b, token in zip(rounded[1:], exact[1:], PROMPTS[4][1:], strict=True)
        if a is not None and b is not None
    ]
    assert len(differences) == len(PROMPTS[4]) - 1
    assert 1e-4 < sum(differences) / len(differences) < 0.3
