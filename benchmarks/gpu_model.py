"""The model of the GPU's benchmarks: the shape of Qwen3-4B with random weights, and the bytes its steps must read."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from common import QWEN3, qwen3_tensors
from safetensors.torch import save_file

QWEN3_4B: Mapping[str, Any] = {
    **QWEN3,
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
}
QUICK: Mapping[str, Any] = {**QWEN3_4B, "num_hidden_layers": 4, "vocab_size": 32000}


def add_places(parser: argparse.ArgumentParser) -> None:
    """Where results and the model go."""
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the results")
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("/dev/shm/qwen3-4b-random"), help="where the model goes"
    )


def checkpoint(folder: Path, config: Mapping[str, Any]) -> Path:
    """Random weights as training begins, made on the GPU and saved unless they are there, whole and of this shape."""
    folder.mkdir(parents=True, exist_ok=True)
    file, said = folder / "model.safetensors", json.dumps(dict(config))
    if file.exists() and (folder / "config.json").read_text(encoding="utf-8") == said:
        return folder
    file.unlink(missing_ok=True)
    (folder / "config.json").write_text(said, encoding="utf-8")

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda") * 0.02).to(torch.bfloat16).cpu()

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    part = folder / "model.part"  # whoever is interrupted leaves no half of a file that looks like a whole one
    save_file(qwen3_tensors(config, normal, ones), part, metadata={"format": "pt"})
    part.rename(file)
    return folder


def weight_bytes(config: Mapping[str, Any]) -> int:
    """Read by a decode step: every matrix, the tied embedding as the output head."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    layer = hidden * (query + 2 * kv) + query * hidden + 3 * hidden * inner
    return 2 * int(config["num_hidden_layers"] * layer + config["vocab_size"] * hidden)


def kv_bytes(config: Mapping[str, Any], tokens: float) -> float:
    """Keys and values of this many tokens, in every layer."""
    return float(4 * tokens * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"])
