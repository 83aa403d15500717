"""A Hugging Face config.json from a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from deepinfer_core.api import CheckpointError

from .gguf_file import GGUFFile

_Number = TypeVar("_Number", int, float)

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

    def size(key: str, default: int | None = None) -> int:
        return _number(file, f"{architecture}.{key}", default, int)

    def real(key: str, default: float | None = None) -> float:
        return _decimal(_number(file, f"{architecture}.{key}", default, float))

    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{file.path}: the matrix 'token_embd.weight' is missing")
    if metadata.get(f"{architecture}.expert_count", 0):
        raise CheckpointError(f"{file.path}: expert layers cannot be read from GGUF; use the checkpoint's safetensors")
    hidden_size, heads = size("embedding_length"), size("attention.head_count")
    head_dim = size("attention.key_length", hidden_size // heads)
    rotary = size("rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise CheckpointError(
            f"{file.path}: rotary positions on {rotary} of {head_dim} head dimensions are not supported"
        )
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_size": hidden_size,
        "num_hidden_layers": size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": size("feed_forward_length"),
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": real("attention.layer_norm_rms_epsilon"),
        "rope_theta": real("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, architecture),
        "vocab_size": int(embedding.shape[1]),
        "max_position_embeddings": size("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "float32",
    }
    if f"{architecture}.attention.sliding_window" in metadata:
        config["sliding_window"] = size("attention.sliding_window")
    for name in ("bos", "eos"):
        if (token := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[f"{name}_token_id"] = int(token)
    return config


def _number(file: GGUFFile, key: str, default: _Number | None, kind: type[_Number]) -> _Number:
    """Metadata ``key`` as a positive number; an array (a size per layer) is refused like any other type."""
    value = file.metadata.require(key) if default is None else file.metadata.get(key, default)
    if not isinstance(value, kind) or not value > 0:
        raise CheckpointError(f"{file.path}: metadata {key!r} is {value!r}, expected a positive {kind.__name__}")
    return value


def _decimal(value: float) -> float:
    """1e-05 rather than 9.999999747378752e-06: the number that was rounded to float32."""
    return float(str(np.float32(value)))


def _rope_scaling(file: GGUFFile, architecture: str) -> dict[str, Any] | None:
    prefix = f"{architecture}.rope.scaling"
    kind = file.metadata.get(f"{prefix}.type", "none")
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _decimal(_number(file, f"{prefix}.factor", None, float))}
    if (original := file.metadata.get(f"{prefix}.original_context_length")) is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling
