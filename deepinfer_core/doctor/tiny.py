"""A model of one layer, all zeros: enough to plan with, no weight is ever read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

HIDDEN, HEADS, KV_HEADS, FFN, VOCAB = 64, 4, 2, 128, 128


def write_tiny(folder: Path) -> Path:
    """A Llama checkpoint in ``folder``, without a tokenizer."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": FFN,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    head, layer = HIDDEN // HEADS, "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        f"{layer}input_layernorm.weight": (HIDDEN,),
        f"{layer}post_attention_layernorm.weight": (HIDDEN,),
        f"{layer}self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        f"{layer}self_attn.k_proj.weight": (KV_HEADS * head, HIDDEN),
        f"{layer}self_attn.v_proj.weight": (KV_HEADS * head, HIDDEN),
        f"{layer}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        f"{layer}mlp.gate_proj.weight": (FFN, HIDDEN),
        f"{layer}mlp.up_proj.weight": (FFN, HIDDEN),
        f"{layer}mlp.down_proj.weight": (HIDDEN, FFN),
    }
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder
