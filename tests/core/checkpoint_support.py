"""Small checkpoints for the tests, written with the formats' own libraries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from gguf import quants
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LAYERS, VOCAB = 4, 2, 16, 64, 2, 96


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def write_directory(directory: Path, files: Mapping[str, Mapping[str, torch.Tensor]], *, index: bool = False) -> Path:
    """config.json and safetensors ``files`` (file name -> tensors), with an index if asked."""
    directory.mkdir(exist_ok=True)
    write_json(directory / "config.json", {"architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB})
    for name, tensors in files.items():
        save_file(dict(tensors), directory / name)
    if index:
        weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
        write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return directory


def tiny_model(architecture: str, *, tied: bool = False) -> torch.nn.Module:
    """A random two-layer model of transformers, in evaluation mode."""
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": 96,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    }
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model: Any = build_model(architecture, sizes)
    result: torch.nn.Module = model.eval()
    return result


def build_model(architecture: str, config: Mapping[str, Any]) -> Any:
    """A model of transformers, freshly initialised."""
    classes: dict[str, tuple[Any, Any]] = {
        "llama": (LlamaForCausalLM, LlamaConfig),
        "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    }
    model_class, config_class = classes[architecture]
    return model_class(config_class(**config))


def weights_of(model: torch.nn.Module, *, tied: bool = False) -> dict[str, torch.Tensor]:
    """Contiguous copies, named as in a checkpoint."""
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if tied:
        del state["lm_head.weight"]
    return state


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in whole:
        return f"{whole[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[part]}.weight"


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to q and k: row h·d + i·2 + s of the file is row h·d + s·d/2 + i."""
    head_dim = weight.shape[0] // heads
    rows = [
        head * head_dim + half * (head_dim // 2) + i
        for head in range(heads)
        for i in range(head_dim // 2)
        for half in range(2)
    ]
    return weight[rows]


def write_gguf(
    path: Path,
    architecture: str,
    weights: Mapping[str, torch.Tensor],
    *,
    matrices: Q = Q.F32,
    embedding: Q = Q.F32,
    metadata: Mapping[str, Any] | None = None,
    skip: tuple[str, ...] = (),
) -> Path:
    """A GGUF file of ``weights`` (Hugging Face names). ``metadata`` adds or replaces scalar values."""
    writer = gguf.GGUFWriter(path, architecture)
    values: dict[str, Any] = {
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.key_length": HEAD_DIM,
        f"{architecture}.feed_forward_length": 96,
        f"{architecture}.context_length": 128,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 50000.0,
    } | dict(metadata or {})
    for key, value in values.items():
        if key not in skip:
            add_metadata(writer, key, value)
    for name, tensor in weights.items():
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = interleave(tensor, HEADS if "q_proj" in name else KV_HEADS)
        qtype = Q.F32 if tensor.ndim == 1 else embedding if "embed" in name else matrices
        writer.add_tensor(gguf_name(name), quants.quantize(tensor.float().numpy(), qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_metadata(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def rounded(tensor: torch.Tensor, qtype: Q) -> torch.Tensor:
    """``tensor`` after a trip through ``qtype``."""
    packed = quants.quantize(tensor.float().numpy(), qtype)
    return torch.from_numpy(np.array(quants.dequantize(packed, qtype)))
