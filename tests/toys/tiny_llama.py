"""A Llama of two layers, small enough to write and run in a moment."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

from .checkpoints import EOS, PADDED_VOCAB, byte_tokenizer

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN = 2, 32, 4, 2, 48


def _tensors() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(11)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=made) / math.sqrt(columns)

    def norm() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(HIDDEN, generator=made)

    tensors = {"model.embed_tokens.weight": weight(PADDED_VOCAB, HIDDEN), "model.norm.weight": norm()}
    head = HIDDEN // HEADS
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {
            f"{prefix}input_layernorm.weight": norm(),
            f"{prefix}post_attention_layernorm.weight": norm(),
            f"{prefix}self_attn.q_proj.weight": weight(HIDDEN, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": weight(KV_HEADS * head, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": weight(KV_HEADS * head, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": weight(HIDDEN, HIDDEN),
            f"{prefix}mlp.gate_proj.weight": weight(FFN, HIDDEN),
            f"{prefix}mlp.up_proj.weight": weight(FFN, HIDDEN),
            f"{prefix}mlp.down_proj.weight": weight(HIDDEN, FFN),
        }
    return tensors


def write_tiny(folder: Path) -> Path:
    """A Llama of two layers of random weights, the same ones each time, with a tokenizer and a chat template."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": FFN,
        "vocab_size": PADDED_VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(_tensors(), folder / "model.safetensors")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    return folder
