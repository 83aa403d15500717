"""Weights at the start, and to and from safetensors files with released names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from .layers import Weights
from .shape import Kind, Shape

Draw = Callable[..., torch.Tensor]
"""``(*size, gain=1.0)`` -> normal numbers of deviation ``gain / sqrt(last size)``."""

SHARD = 11_900_000
"""Bytes of a shard's tensors, at most: with its header it stays under 12 MB."""


def kept_wide(name: str) -> bool:
    """Whether a checkpoint keeps this tensor in float32."""
    last = name.rsplit(".", 1)[-1]
    return last in ("ape", "attn_sink", "bias") or last.startswith("hc_")


def hash_tables(shape: Shape, counts: np.ndarray, seed: int) -> list[torch.Tensor]:
    """``tid2eid [vocab, top_k]`` int32 of each hash layer.

    Token ids in falling order of their count in the training text go to the experts with the least text so far, so
    that experts get equal shares; noise of one mean token count parts the layers.
    """
    tables = []
    order = np.argsort(-counts, kind="stable")
    for layer in range(shape.hashed):
        rng = np.random.default_rng([seed, layer])
        load = np.zeros(shape.experts)
        table = np.zeros((shape.vocab, shape.top_k), np.int32)
        for token in order:
            noisy = load + rng.random(shape.experts) * counts.mean()
            picks = np.argsort(noisy, kind="stable")[: shape.top_k]
            load[picks] += max(int(counts[token]), 1)
            table[token] = np.sort(picks)
        tables.append(torch.from_numpy(table))
    return tables


def initial(shape: Shape, counts: np.ndarray, seed: int = 0) -> Weights:
    """Float32 weights before training; the tables and biases among them are not learned by gradient."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int, gain: float = 1.0) -> torch.Tensor:
        drawn: torch.Tensor = torch.randn(*size, generator=generator) * gain * size[-1] ** -0.5
        return drawn

    w: Weights = {"embed.weight": torch.randn(shape.vocab, shape.hidden, generator=generator) * 0.5}
    for layer, kind in enumerate(shape.kinds):
        p = f"layers.{layer}."
        for number, part in enumerate(("attn", "ffn")):
            w[f"{p}{part}_norm.weight"] = torch.ones(shape.hidden)
            w |= _hyper(shape, f"{p}hc_{part}_", 2 * layer + number, normal)
        w |= _attention(shape, f"{p}attn.", kind, normal)
        w[f"{p}ffn.gate.weight"] = normal(shape.experts, shape.hidden)
        if layer >= shape.hashed:
            w[f"{p}ffn.gate.bias"] = torch.zeros(shape.experts)
        inner, outer = (shape.experts, shape.width, shape.hidden), (shape.experts, shape.hidden, shape.width)
        for name, size in (("w1", inner), ("w3", inner), ("w2", outer)):
            gain = 0.3 if name == "w2" else 1.0
            w[f"{p}ffn.experts.{name}.weight"] = normal(*size, gain=gain)
            w[f"{p}ffn.shared_experts.{name}.weight"] = normal(*size[1:], gain=gain)
    for layer, table in enumerate(hash_tables(shape, counts, seed)):
        w[f"layers.{layer}.ffn.gate.tid2eid"] = table
    w["hc_head_fn"] = normal(shape.streams, shape.streams * shape.hidden)
    w["hc_head_base"] = torch.zeros(shape.streams)
    w["hc_head_scale"] = torch.full((1,), 0.1)
    w["norm.weight"] = torch.ones(shape.hidden)
    w["head.weight"] = normal(shape.vocab, shape.hidden, gain=0.3)
    return w


def _hyper(shape: Shape, prefix: str, sublayer: int, normal: Draw) -> Weights:
    """Read one stream (another for each sub-layer), write to all, keep each stream to itself."""
    m = shape.streams
    pre = torch.full((m,), -2.0)
    pre[sublayer % m] = 2.0
    keep = torch.eye(m) * 4
    return {
        f"{prefix}fn": normal((2 + m) * m, m * shape.hidden),
        f"{prefix}base": torch.cat((pre, torch.zeros(m), keep.flatten())),
        f"{prefix}scale": torch.full((3,), 0.1),
    }


def _attention(shape: Shape, p: str, kind: Kind, normal: Draw) -> Weights:
    hidden, d = shape.hidden, shape.head_dim
    w: Weights = {
        f"{p}attn_sink": torch.zeros(shape.heads),
        f"{p}wq_a.weight": normal(shape.q_rank, hidden),
        f"{p}q_norm.weight": torch.ones(shape.q_rank),
        f"{p}wq_b.weight": normal(shape.heads * d, shape.q_rank),
        f"{p}wkv.weight": normal(d, hidden),
        f"{p}kv_norm.weight": torch.ones(d),
        f"{p}wo_a.weight": normal(shape.o_groups * shape.o_rank, shape.heads // shape.o_groups * d),
        f"{p}wo_b.weight": normal(hidden, shape.o_groups * shape.o_rank, gain=0.3),
    }
    if kind == "hca":
        w |= _compressor(f"{p}compressor.", shape.hca_rate, d, d, hidden, normal)
    if kind == "csa":
        w |= _compressor(f"{p}compressor.", shape.csa_rate, 2 * d, d, hidden, normal)
        i = shape.index_dim
        w |= _compressor(f"{p}indexer.compressor.", shape.csa_rate, 2 * i, i, hidden, normal)
        w[f"{p}indexer.wq_b.weight"] = normal(shape.index_heads * i, shape.q_rank)
        w[f"{p}indexer.weights_proj.weight"] = normal(shape.index_heads, hidden)
    return w


def _compressor(p: str, rate: int, width: int, out: int, hidden: int, normal: Draw) -> Weights:
    return {
        f"{p}wkv.weight": normal(width, hidden),
        f"{p}wgate.weight": normal(width, hidden, gain=0.3),
        f"{p}ape": torch.zeros(rate, width),
        f"{p}norm.weight": torch.ones(out),
    }


def released(weights: Weights) -> Weights:
    """Experts apart, each under its released name."""
    found: Weights = {}
    for name, tensor in weights.items():
        if ".ffn.experts." in name:
            prefix, matrix = name.split(".experts.")
            found |= {f"{prefix}.experts.{e}.{matrix}": part for e, part in enumerate(tensor.unbind(0))}
        else:
            found[name] = tensor
    return found


def stacked(weights: Weights) -> Weights:
    """The inverse of :func:`released`."""
    found: Weights = {}
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in weights.items():
        if ".ffn.experts." in name:
            prefix, rest = name.split(".experts.")
            number, matrix = rest.split(".", 1)
            parts.setdefault(f"{prefix}.experts.{matrix}", {})[int(number)] = tensor
        else:
            found[name] = tensor
    return found | {name: torch.stack([of[e] for e in range(len(of))]) for name, of in parts.items()}


def save(weights: Weights, directory: Path) -> None:
    """bfloat16 shards with an index; what a checkpoint keeps in float32 stays so."""
    directory.mkdir(parents=True, exist_ok=True)
    stored = {}
    for name, tensor in released(weights).items():
        narrow = tensor.is_floating_point() and not kept_wide(name)
        stored[name] = tensor.detach().to("cpu", torch.bfloat16 if narrow else tensor.dtype).contiguous()
    shards: list[Weights] = [{}]
    size = 0
    for name in sorted(stored):
        if size + stored[name].nbytes > SHARD:
            shards.append({})
            size = 0
        shards[-1][name] = stored[name]
        size += stored[name].nbytes
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, directory / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in stored.values())},
        "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in sorted(shard)},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def load(directory: Path) -> Weights:
    """Float32 weights of a saved model, experts stacked."""
    found: Weights = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return stacked({name: t.float() if t.is_floating_point() else t for name, t in found.items()})
