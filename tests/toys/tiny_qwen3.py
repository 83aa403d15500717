"""A Qwen3 of two layers with random weights and no end token, written as a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


def write_tiny_qwen3(path: Path, **sizes: int) -> Path:
    """Weights in float32; ``sizes`` are fields of the configuration other than :data:`SIZES`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(**SIZES | sizes, bos_token_id=None, eos_token_id=None))
    model.generation_config.eos_token_id = None
    model.float().save_pretrained(path)
    return path
