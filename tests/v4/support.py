"""Fresh random DeepSeek-V4 models and their oracle in transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from v4.stepper import BLOCK, Build, Mutant, Stepper, chunk_ends, mutated, plan_of  # noqa: F401  tests import all here

VOCAB, HCA_RATE = 128, 16
TOLERANCE = 1e-4
CSA = "compressed_sparse_attention"
HCA = "heavily_compressed_attention"
SLIDING = "sliding_attention"


def tiny_config(**changes: Any) -> DeepseekV4Config:
    """Four layers, one of each kind and a second CSA; 16 index heads, so that scores of exactly 0 are rare."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 32,
        "q_lora_rank": 24,
        "partial_rotary_factor": 0.25,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "layer_types": [SLIDING, CSA, HCA, CSA],
        "compress_rates": {CSA: 4, HCA: HCA_RATE},
        "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
        "sliding_window": 8,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 3,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "max_position_embeddings": 4096,
        "num_nextn_predict_layers": 0,
        "pad_token_id": 2,
    }
    config = DeepseekV4Config(**(fields | changes))
    config._attn_implementation = "eager"
    return config


def random_model(seed: int, **changes: Any) -> Any:
    """A model with every constant-initialised tensor randomised, or mistakes would hide."""
    generator = torch.Generator().manual_seed(seed)

    def normal(shape: Sequence[int], scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    model: Any = DeepseekV4ForCausalLM(tiny_config(**changes))
    model.eval()
    top_k, experts = model.config.num_experts_per_tok, model.config.n_routed_experts
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("inv_freq"):
                continue
            if "tid2eid" in name:
                rows = [torch.randperm(experts, generator=generator)[:top_k] for _ in range(tensor.shape[0])]
                tensor.copy_(torch.stack(rows))
            elif "norm" in name:
                tensor.copy_(1 + normal(tensor.shape, 0.3))
            elif "scale" in name:
                tensor.copy_(normal(tensor.shape, 0.5) + 1)
            elif tensor.dim() == 1 or "position_bias" in name:
                tensor.copy_(normal(tensor.shape, 0.5))
            elif "experts" in name:
                tensor.copy_(normal(tensor.shape, 6 * tensor.shape[-1] ** -0.5))
            else:
                tensor.copy_(normal(tensor.shape, 1.5 * tensor.shape[-1] ** -0.5))
    return model


@attrs.frozen
class Oracle:
    """transformers' answer for one text: ``logprobs [n, vocab]`` float64, and positions whose choice of entries hangs
    on a score difference below 1e-5 of the scores' size."""

    tokens: list[int]
    logprobs: torch.Tensor
    near_ties: frozenset[int]


def oracle(model: DeepseekV4ForCausalLM, tokens: Sequence[int]) -> Oracle:
    """One full forward pass, without a cache."""
    ids = torch.tensor([list(tokens)])
    scores: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _m, _i, out: scores.append(out[0].detach()))
        for name, module in model.named_modules()
        if name.endswith("indexer.scorer")
    ]
    with torch.inference_mode():
        logits = model(ids, use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    ties = [p for s in scores for p in _near_ties(s, model.config.index_topk)]
    return Oracle(list(tokens), torch.log_softmax(logits.double(), -1), frozenset(ties))


def _near_ties(scores: torch.Tensor, top_k: int) -> list[int]:
    found = []
    for position in range(scores.shape[0]):
        seen = scores[position, : (position + 1) // 4].sort(descending=True).values
        if len(seen) > top_k and seen[top_k - 1] - seen[top_k] < 1e-5 * seen.abs().max():
            found.append(position)
    return found


def greedy(model: DeepseekV4ForCausalLM, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy continuation by full forward passes."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.inference_mode():
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def random_tokens(seed: int, count: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_same(found: torch.Tensor, wanted: Oracle, what: str, positions: Sequence[int] | None = None) -> None:
    """Logprobs of these positions (all by default) agree, those from the first near tie on excepted."""
    rows = list(range(len(wanted.tokens))) if positions is None else list(positions)
    clean = [i for i, p in enumerate(rows) if not wanted.near_ties or p < min(wanted.near_ties)]
    difference = (found.double() - wanted.logprobs[rows]).abs().amax(-1)
    worst = float(difference[clean].max()) if clean else 0.0
    assert worst < TOLERANCE, f"{what}: logprobs differ by {worst:.2e} at row {int(difference[clean].argmax())}"
