"""Texts for the demo model, and the training forward's answer as the oracle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from deepinfer_demo_v4 import CHECKPOINT
from deepinfer_demo_v4.held_out import held_out_texts
from deepinfer_demo_v4.recipe import attention, checkpoint, forward
from deepinfer_demo_v4.recipe.attention import Selection
from deepinfer_demo_v4.recipe.layers import Weights
from deepinfer_demo_v4.recipe.shape import CONFIG, Shape
from tokenizers import Tokenizer
from v4.support import Oracle, _near_ties

LENGTH = 330
"""Tokens of a text: 82 entries of 4 tokens, of which 64 are chosen, and 10 of 32."""

SMALL: dict[str, Any] = {
    **CONFIG,
    "vocab_size": 96,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 24,
    "o_lora_rank": 16,
    "sliding_window": 8,
    "compress_ratios": [0, 4, 8, 4],
    "num_hidden_layers": 4,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 4,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
"""The same architecture, small."""


@cache
def trained() -> tuple[Weights, Shape]:
    """The demo model's weights and sizes."""
    config = json.loads((CHECKPOINT / "config.json").read_text())
    return checkpoint.load(CHECKPOINT), Shape.read(config)


@cache
def text_tokens(number: int) -> tuple[int, ...]:
    """Tokens of a held-out file of the standard library."""
    texts = [text for _, text in sorted(held_out_texts().items()) if len(text) > 6000]
    return tuple(Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")).encode(texts[number]).ids[:LENGTH])


def random_weights(shape: Shape, seed: int) -> Weights:
    """Weights as before training, with everything that starts constant drawn at random, or mistakes would hide."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 1000, (shape.vocab,), generator=generator).numpy()
    weights = checkpoint.initial(shape, counts, seed)
    for name, tensor in weights.items():
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name or name.endswith("scale"):
            weights[name] = 1 + 0.3 * noise
        elif tensor.is_floating_point() and (tensor.dim() == 1 or name.endswith("ape")):
            weights[name] = tensor + 0.5 * noise
    return weights


def answer(weights: Weights, shape: Shape, tokens: Sequence[int], dtype: torch.dtype = torch.float32) -> Oracle:
    """The training forward over the whole text, with the engine's rule for equal index scores."""
    seen: list[torch.Tensor] = []
    scores = attention.index_scores

    def recorded(*arguments: Any) -> torch.Tensor:
        seen.append(scores(*arguments))
        return seen[-1]

    with torch.inference_mode(), mock.patch.object(attention, "index_scores", recorded):
        ids = torch.tensor([list(tokens)])
        hidden = forward.forward(weights, ids, shape, Selection(exact=True), dtype).hidden
        logprobs = torch.log_softmax(forward.logits(weights, hidden)[0].double(), -1)
    ties = [p for s in seen for p in _near_ties(s[0], shape.index_top_k)]
    return Oracle(list(tokens), logprobs, frozenset(ties))


def write(weights: Weights, config: dict[str, Any], path: Path) -> Path:
    """A checkpoint of these weights."""
    checkpoint.save(weights, path)
    (path / "config.json").write_text(json.dumps(config))
    return path
