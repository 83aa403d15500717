"""Tiny random checkpoints, written as a publisher would write them: a few hundred kilobytes, the same in every run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from deepinfer_core.api import ModelOptions, ModelSpec
from deepinfer_core.plugins import Registry, resolve

QWEN3: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 192,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
}

QWEN3_WINDOW: Mapping[str, Any] = {
    **QWEN3,
    "use_sliding_window": True,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

DEEPSEEK_V4: Mapping[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 8,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 3,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "compress": {
            "rope_type": "yarn",
            "rope_theta": 160000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32,
            "beta_slow": 1,
            "attention_factor": 1.0,
            "partial_rotary_factor": 0.25,
        },
    },
}


def describe(config: Mapping[str, Any], registry: Registry, dtype: str) -> ModelSpec:
    """What the model of a config.json needs."""
    definition: Any = resolve(registry, "architecture", config["architectures"][0])[1].definition.load()
    options = ModelOptions(dtype=dtype, max_model_len=None, block_size=16, device_type="cpu")
    spec: ModelSpec = definition.describe(config, options)
    return spec


def write_checkpoint(folder: Path, config: Mapping[str, Any], spec: ModelSpec, dtype: str) -> None:
    """Random weights, rounded to bfloat16 and stored in ``dtype``, so that every dtype holds the same model.

    Nothing is left at a neutral value (norms at 1, biases at 0), or mistakes would hide behind it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(20)
    tensors = {}
    for name, wanted in sorted(spec.tensors.items()):
        if name.endswith("tid2eid"):
            table = torch.rand(wanted.shape[0], config["n_routed_experts"], generator=draw).argsort(1)
            tensors[name] = table[:, : wanted.shape[1]].contiguous()
            continue
        values = torch.randn(wanted.shape, generator=draw) * _scale(name, wanted.shape)
        if "norm" in name or "scale" in name:
            values = values + 1
        tensors[name] = values.to(torch.bfloat16).to(getattr(torch, dtype))
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "dtype": dtype}), encoding="utf-8")


def _scale(name: str, shape: tuple[int, ...]) -> float:
    if "norm" in name or "scale" in name:
        return 0.3
    if len(shape) == 1 or name.endswith("ape"):
        return 0.5
    return (4.0 if ".experts." in name else 1.5) / math.sqrt(shape[-1])
