"""What the benchmarks share: machine facts, models made on the spot, and how results are printed."""

from __future__ import annotations

import json
import math
import os
import platform
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

QWEN3: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
"""41.6 million parameters, 166 MB in float32."""


def random_qwen3(directory: Path, changes: Mapping[str, Any] | None = None, seed: int = 0) -> Path:
    """A Qwen3 checkpoint without tokenizer: float32 weights, normal with deviation 0.02, as training begins."""
    config = {**QWEN3, **(changes or {})}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.02

    tensors = qwen3_tensors(config, normal, torch.ones)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def qwen3_tensors(
    config: Mapping[str, Any], normal: Callable[..., torch.Tensor], ones: Callable[[int], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """A Qwen3 with a tied head, by names in a checkpoint: matrices are ``normal(out, in)``, norms ``ones(size)``."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    tensors = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden), "model.norm.weight": ones(hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, size in (
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
            ("self_attn.q_norm", dim),
            ("self_attn.k_norm", dim),
        ):
            tensors[f"{prefix}.{name}.weight"] = ones(size)
        for name, shape in (
            ("self_attn.q_proj", (query, hidden)),
            ("self_attn.k_proj", (kv, hidden)),
            ("self_attn.v_proj", (kv, hidden)),
            ("self_attn.o_proj", (hidden, query)),
            ("mlp.gate_proj", (inner, hidden)),
            ("mlp.up_proj", (inner, hidden)),
            ("mlp.down_proj", (hidden, inner)),
        ):
            tensors[f"{prefix}.{name}.weight"] = normal(*shape)
    return tensors


def random_prompts(count: int, length: int, *, seed: int = 0, vocab_size: int = 32000) -> list[list[int]]:
    """Token ids from 300 up, so that none is special."""
    source = random.Random(seed)
    return [[source.randrange(300, vocab_size) for _ in range(length)] for _ in range(count)]


def machine() -> dict[str, Any]:
    """Processor, cores, torch, and how busy the machine was when this was called."""
    cpu = platform.processor() or platform.machine()
    path = Path("/proc/cpuinfo")
    if path.exists():
        names = [
            line.partition(":")[2].strip() for line in path.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
    }


def print_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Columns wide enough for their longest cell; floats with three digits."""
    cells = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        print("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)), flush=True)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return "-" if value is None else str(value)


def say(text: str) -> None:
    """What is measured now, on standard error: tables come when their last row is there."""
    print(text, file=sys.stderr, flush=True)


def step_seconds(whole: float, one: float, tokens: int) -> float:
    """Seconds of a decode step, from those of ``tokens`` tokens and of one; not a number where other work decided.

    A round in which one token took as long as all of them measured the rest of the machine: :func:`settled` leaves
    it out.
    """
    step = (whole - one) / (tokens - 1)
    return step if step > 0 else math.nan


def settled(values: Sequence[float], what: str) -> list[float]:
    """The rounds that measured something; says how many did not.

    Raises:
        SystemExit: none did.
    """
    kept = [value for value in values if not math.isnan(value)]
    if not kept:
        sys.exit(f"{what}: one token took as long as many in each of {len(values)} rounds; run on an idle machine")
    if len(kept) < len(values):
        say(f"{what}: {len(values) - len(kept)} of {len(values)} rounds left out: one token took as long as many")
    return kept


def finish(result: Mapping[str, Any], as_json: bool) -> None:
    """The JSON object as the last line, when it was asked for."""
    if as_json:
        print(json.dumps(result))
