"""Tiny Qwen3 targets, drafters for them in DeepSpec's format, and what these should say, by a float64 formula."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import save_file
from toys.dense import SIZES, VOCAB
from transformers import Qwen3Config, Qwen3ForCausalLM

LAYERS, DRAFT_LAYERS, BLOCK, MASK, RANK = 4, 2, 7, 95, 6
TAPS = [0, 2, 3]
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER = 4, 2, 8, 32, 48
EPS, THETA = 1e-6, 10000.0


def write_target(root: Path, seed: int = 0) -> Any:
    """A random Qwen3, saved; returns transformers' model in float64."""
    torch.manual_seed(seed)
    config = Qwen3Config(**{**SIZES, "num_hidden_layers": LAYERS, "rms_norm_eps": EPS, "tie_word_embeddings": False})
    config.rope_parameters = {"rope_type": "default", "rope_theta": THETA}
    model = Qwen3ForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name:
                tensor.copy_(1 + 0.3 * torch.randn_like(tensor))
    model.save_pretrained(root)
    return model.double()


@attrs.frozen(eq=False)
class Qwen3Drafter:
    """A draft checkpoint and its tensors in float64."""

    path: Path
    target: Any
    tensors: dict[str, torch.Tensor]
    rank: int
    confidence: bool
    tied: bool

    def block(self, tokens: list[int]) -> tuple[torch.Tensor, list[int], list[float]]:
        """Base logits ``[BLOCK, V]``, greedy drafts and confidence logits after these tokens, the last the newest."""
        w = self.tensors
        with torch.inference_mode():
            states = self.target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        features = torch.cat([self._leaving(states, tokens[:-1], tap) for tap in TAPS], -1)
        context = rms(features @ w["fc.weight"].T, w["hidden_norm.weight"])
        past = len(tokens) - 1
        x = w["embed_tokens.weight"][torch.tensor([tokens[-1]] + [MASK] * (BLOCK - 1))]
        before, own = torch.arange(past), torch.arange(past, past + BLOCK)
        for layer in range(DRAFT_LAYERS):
            p = f"layers.{layer}."
            a = rms(x, w[p + "input_layernorm.weight"])
            q = self._heads(a, p, "q", HEADS)
            keys = torch.cat((self._heads(context, p, "k", KV_HEADS), self._heads(a, p, "k", KV_HEADS)))
            values = torch.cat(
                [(s @ w[p + "self_attn.v_proj.weight"].T).view(-1, KV_HEADS, HEAD_DIM) for s in (context, a)]
            )
            q, keys = rotate(q, own), rotate(keys, torch.cat((before, own)))
            spread = HEADS // KV_HEADS
            keys, values = keys.repeat_interleave(spread, 1), values.repeat_interleave(spread, 1)
            weights = torch.einsum("qhd,khd->hqk", q, keys).div(HEAD_DIM**0.5).softmax(-1)
            attended = torch.einsum("hqk,khd->qhd", weights, values).flatten(1)
            x = x + attended @ w[p + "self_attn.o_proj.weight"].T
            b = rms(x, w[p + "post_attention_layernorm.weight"])
            gate, up = (b @ w[f"{p}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
            x = x + (torch.nn.functional.silu(gate) * up) @ w[p + "mlp.down_proj.weight"].T
        hidden = rms(x, w["norm.weight"])
        logits = hidden @ w["lm_head.weight"].T
        drafts, confidence, previous = [], [], tokens[-1]
        for j in range(BLOCK):
            scores, said = logits[j], hidden[j]
            if self.rank:
                tie = w["markov_head.markov_w1.weight"][previous]
                scores = scores + w["markov_head.markov_w2.weight"] @ tie
                said = torch.cat((said, tie)) if self.tied else said
            if self.confidence:
                confidence.append(float(w["confidence_head.proj.weight"][0] @ said + w["confidence_head.proj.bias"][0]))
            previous = int(scores.argmax())
            drafts.append(previous)
        return logits, drafts, confidence

    def _leaving(self, states: Any, tokens: list[int], layer: int) -> torch.Tensor:
        """What leaves a layer; transformers norms the last, so that one is run by hand."""
        if layer + 1 < LAYERS:
            return states[layer + 1][0]
        caught: list[torch.Tensor] = []
        hook = self.target.model.layers[layer].register_forward_hook(lambda _m, _i, out: caught.append(out))
        with torch.inference_mode():
            self.target(torch.tensor([tokens]))
        hook.remove()
        out = caught[0][0] if isinstance(caught[0], tuple) else caught[0]
        return out[0] if out.dim() == 3 else out

    def _heads(self, x: torch.Tensor, p: str, which: str, heads: int) -> torch.Tensor:
        projected = (x @ self.tensors[f"{p}self_attn.{which}_proj.weight"].T).view(-1, heads, HEAD_DIM)
        return rms(projected, self.tensors[f"{p}self_attn.{which}_norm.weight"])


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Halves, ``[T, heads, d]``."""
    half = HEAD_DIM // 2
    angle = positions[:, None].double() * THETA ** -(torch.arange(half).double() / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def write_drafter(
    root: Path, target: Any, *, rank: int = RANK, confidence: bool = True, tied: bool = True
) -> Qwen3Drafter:
    """A random drafter in DeepSpec's format; rank 0 and no confidence is DFlash."""
    generator = torch.Generator().manual_seed(rank + 10 * confidence)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 1.5 * shape[-1] ** -0.5

    tensors = {
        "embed_tokens.weight": target.model.embed_tokens.weight.detach().float().clone(),
        "lm_head.weight": target.lm_head.weight.detach().float().clone(),
        "fc.weight": normal(HIDDEN, len(TAPS) * HIDDEN),
        "hidden_norm.weight": 1 + 0.2 * normal(HIDDEN),
        "norm.weight": 1 + 0.2 * normal(HIDDEN),
    }
    for layer in range(DRAFT_LAYERS):
        p = f"layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{p}{name}.weight"] = 1 + 0.2 * normal(HIDDEN)
        for name, rows, columns in (
            ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
            ("mlp.gate_proj", INNER, HIDDEN),
            ("mlp.up_proj", INNER, HIDDEN),
            ("mlp.down_proj", HIDDEN, INNER),
        ):
            tensors[f"{p}{name}.weight"] = normal(rows, columns)
        for name in ("q_norm", "k_norm"):
            tensors[f"{p}self_attn.{name}.weight"] = 1 + 0.2 * normal(HEAD_DIM)
    if rank:
        tensors |= {f"markov_head.markov_w{i}.weight": normal(VOCAB, rank) * 2 for i in (1, 2)}
    if confidence:
        tensors |= {"confidence_head.proj.weight": normal(1, HIDDEN + (rank if tied else 0))}
        tensors |= {"confidence_head.proj.bias": normal(1)}
    root.mkdir(parents=True, exist_ok=True)
    save_file(tensors, root / "model.safetensors")
    config = {
        **SIZES,
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "num_hidden_layers": DRAFT_LAYERS,
        "num_target_layers": LAYERS,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "target_layer_ids": TAPS,
        "layer_types": ["full_attention"] * DRAFT_LAYERS,
        "markov_rank": rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": tied,
    }
    (root / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return Qwen3Drafter(root, target, {n: t.double() for n, t in tensors.items()}, rank, confidence, tied)
