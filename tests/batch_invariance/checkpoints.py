"""The models that the determinism suite runs, and what it asks of them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from toys.dense import SIZES
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from v4.support import random_model

SLIDING: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
}


@attrs.frozen
class Checkpoint:
    """``path``, and the settings its tests begin from; ``vocab``: tokens that prompts are made of."""

    path: str
    vocab: int
    settings: Mapping[str, Any] = attrs.field(factory=dict)

    def prompt(self, length: int, seed: int = 0) -> tuple[int, ...]:
        source = random.Random(f"{self.path[-9:]} {length} {seed}")
        return tuple(source.randrange(3, self.vocab) for _ in range(length))


def tiny_qwen3(directory: Path) -> Checkpoint:
    """Two layers, one with a sliding window; norms of queries and keys."""
    return _saved(directory, Qwen3ForCausalLM, Qwen3Config(**SIZES | SLIDING))


def tiny_llama(directory: Path) -> Checkpoint:
    """Two layers of the plainest kind, in sizes that no vector divides."""
    odd = {"hidden_size": 36, "intermediate_size": 51, "head_dim": 10}
    return _saved(directory, LlamaForCausalLM, LlamaConfig(**SIZES | odd))


def tiny_v4(directory: Path) -> Checkpoint:
    """DeepSeek-V4: a window layer, two of compressed sparse attention, one heavily compressed, experts in each."""
    with torch.random.fork_rng():
        model = random_model(5)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    model.save_pretrained(directory)
    return Checkpoint(str(directory), 128, SMALL)


def demo() -> Checkpoint:
    """SmolLM2-135M."""
    return Checkpoint("demo", 49152, {"logging.progress": False, **BLOCKS})


BLOCKS: Mapping[str, Any] = {"kv_cache.block_size": 32}
"""So that a short prompt fills one, and a short output begins another; keys lie by channel from this size on."""

SMALL: Mapping[str, Any] = {
    "logging.progress": False,
    "logging.level": "error",
    "kv_cache.num_blocks": 700,
    "model.max_model_len": 128,
}


def _saved(directory: Path, kind: Any, config: Any) -> Checkpoint:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        kind(config).save_pretrained(directory)
    return Checkpoint(str(directory), SIZES["vocab_size"], {**SMALL, **BLOCKS})
