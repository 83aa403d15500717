"""A Hugging Face config.json from a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from deepinfer_core.api import CheckpointError

from .gguf_file import GGUFFile

ARCHITECTURES: Mapping[str, str] = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""GGUF architecture -> the config.json entry that serves it."""


def gguf_architecture(file: GGUFFile) -> str:
    """``general.architecture``, checked against :data:`ARCHITECTURES`."""
    architecture = str(file.metadata.require("general.architecture"))
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: architecture {architecture!r} cannot be read from GGUF (only {', '.join(ARCHITECTURES)}); "
            "use the checkpoint's safetensors"
        )
    return architecture


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """What config.json would say about ``file``. Floats are the shortest decimals of the stored float32."""
    architecture = gguf_architecture(file)
    metadata = file.metadata

    def required(key: str) -> Any:
        return metadata.require(f"{architecture}.{key}")

    def optional(key: str, default: Any) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: tensor 'token_embd.weight' is missing")
    if optional("expert_count", 0):
        raise CheckpointError(f"{file.path}: expert layers cannot be read from GGUF; use the checkpoint's safetensors")
    hidden_size, heads = int(required("embedding_length")), int(required("attention.head_count"))
    head_dim = int(optional("attention.key_length", hidden_size // heads))
    rotary = int(optional("rope.dimension_count", head_dim))
    if rotary != head_dim:
        raise CheckpointError(
            f"{file.path}: rotary positions on {rotary} of {head_dim} head dimensions are not supported"
        )
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_size": hidden_size,
        "num_hidden_layers": int(required("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(optional("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "intermediate_size": int(required("feed_forward_length")),
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": _decimal(required("attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(optional("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(file, architecture),
        "vocab_size": int(embedding.shape[1]),
        "max_position_embeddings": int(required("context_length")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "float32",
    }
    if window := optional("attention.sliding_window", 0):
        config["sliding_window"] = int(window)
    for name in ("bos", "eos"):
        if (token := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[f"{name}_token_id"] = int(token)
    return config


def _decimal(value: float) -> float:
    """1e-05 rather than 9.999999747378752e-06: the number that was rounded to float32."""
    return float(str(np.float32(value)))


def _rope_scaling(file: GGUFFile, architecture: str) -> dict[str, Any] | None:
    prefix = f"{architecture}.rope.scaling"
    kind = file.metadata.get(f"{prefix}.type", "none")
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _decimal(file.metadata.require(f"{prefix}.factor"))}
    if (original := file.metadata.get(f"{prefix}.original_context_length")) is not None:
        scaling["original_max_position_embeddings"] = int(original)
    return scaling
