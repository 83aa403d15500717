"""A checkpoint small enough to count by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

LAYERS, HIDDEN, HEADS, KV_HEADS, VOCAB, FFN = 2, 32, 4, 2, 50, 64
HEAD = HIDDEN // HEADS


def write_checkpoint(folder: Path) -> Path:
    """A Llama of two layers, all zeros, without a tokenizer."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": FFN,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{prefix}mlp.gate_proj.weight": (FFN, HIDDEN),
            f"{prefix}mlp.up_proj.weight": (FFN, HIDDEN),
            f"{prefix}mlp.down_proj.weight": (HIDDEN, FFN),
            f"{prefix}input_layernorm.weight": (HIDDEN,),
            f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
        }
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def parameters() -> int:
    attention = 2 * HIDDEN * HIDDEN + 2 * KV_HEADS * HEAD * HIDDEN
    return VOCAB * HIDDEN + HIDDEN + LAYERS * (attention + 3 * HIDDEN * FFN + 2 * HIDDEN)
