"""Norms, hyper-connections and experts over whole sequences, differentiable.

Matrix products run in the dtype of their input; what the architecture keeps in float32 is computed in float32.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from .shape import Shape

Weights = dict[str, torch.Tensor]


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x W^T`` in x's dtype."""
    return functional.linear(x, weight.to(x.dtype))


def rms(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMS norm over the last dimension, statistics in float32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * weight).to(x.dtype)


def coefficients(streams: torch.Tensor, w: Weights, prefix: str, shape: Shape) -> torch.Tensor:
    """``z [B, T, rows]`` float32 of ``streams [B, T, M, D]``."""
    flat = streams.flatten(2)
    scale = torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + shape.eps)
    return linear(flat, w[f"{prefix}fn"]).float() * scale


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """``[..., M, M]`` -> nearly doubly stochastic: softmax of rows, then columns and rows in turn."""
    comb = torch.softmax(logits, dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def mix(
    streams: torch.Tensor, w: Weights, prefix: str, shape: Shape
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``[B, T, M, D]`` -> the sub-layer's input ``[B, T, D]``, ``post [B, T, M]`` and ``C [B, T, M, M]``."""
    m = shape.streams
    scale, base = w[f"{prefix}scale"], w[f"{prefix}base"]
    z = coefficients(streams, w, prefix, shape)
    pre = torch.sigmoid(z[..., :m] * scale[0] + base[:m]) + shape.hyper_eps
    post = 2 * torch.sigmoid(z[..., m : 2 * m] * scale[1] + base[m : 2 * m])
    logits = (z[..., 2 * m :] * scale[2] + base[2 * m :]).reshape(*z.shape[:-1], m, m)
    mixed = (pre[..., None] * streams.float()).sum(2).to(streams.dtype)
    return mixed, post, sinkhorn(logits, shape.sinkhorn, shape.hyper_eps)


def merge(streams: torch.Tensor, output: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """``h'_k = post_k output + sum_j C_jk h_j``."""
    wide = streams.float()
    kept = sum(comb[:, :, j, :, None] * wide[:, :, j, None, :] for j in range(streams.shape[2]))
    return (post[..., None] * output.float()[:, :, None, :] + kept).to(streams.dtype)


def collapse(streams: torch.Tensor, w: Weights, shape: Shape) -> torch.Tensor:
    """The streams' last sum, normed for the output head: ``[B, T, M, D]`` -> ``[B, T, D]``."""
    z = coefficients(streams, w, "hc_head_", shape)
    pre = torch.sigmoid(z * w["hc_head_scale"] + w["hc_head_base"]) + shape.hyper_eps
    return rms((pre[..., None] * streams.float()).sum(2).to(streams.dtype), w["norm.weight"], shape.eps)


def choose_experts(x: torch.Tensor, ids: torch.Tensor, w: Weights, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [B, T, D]`` and token ids ``[B, T]`` -> weight of every expert ``[B, T, E]``, 0 for those not chosen; chosen
    experts ``[B, T, K]``.

    A layer with ``gate.tid2eid`` looks its experts up; the others take the best by score plus ``gate.bias``, and
    weigh them by score alone.
    """
    scores = functional.softplus(functional.linear(x.float(), w["ffn.gate.weight"].float())).sqrt()
    if "ffn.gate.tid2eid" in w:
        chosen = w["ffn.gate.tid2eid"][ids].long()
    else:
        chosen = (scores + w["ffn.gate.bias"]).topk(shape.top_k, dim=-1).indices
    taken = scores.gather(-1, chosen)
    taken = taken / taken.sum(-1, keepdim=True).clamp(min=1e-20) * shape.routed_scale
    return torch.zeros_like(scores).scatter(-1, chosen, taken), chosen


def experts(x: torch.Tensor, ids: torch.Tensor, w: Weights, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """``[B, T, D]`` -> ``[B, T, D]``, and the chosen experts ``[B, T, K]``.

    Every expert is computed for every token and weighed, most by zero: a few large products are quicker on the
    training machine than many small ones, and the result is the same.
    """
    weights, chosen = choose_experts(x, ids, w, shape)
    gate = linear(x, w["ffn.experts.w1.weight"].flatten(0, 1))
    up = linear(x, w["ffn.experts.w3.weight"].flatten(0, 1))
    inner = swiglu(gate, up, shape.limit).view(*ids.shape, shape.experts, shape.width) * weights[..., None]
    routed = linear(inner.flatten(2).to(x.dtype), w["ffn.experts.w2.weight"].permute(1, 0, 2).flatten(1))
    gate, up = linear(x, w["ffn.shared_experts.w1.weight"]), linear(x, w["ffn.shared_experts.w3.weight"])
    shared = linear(swiglu(gate, up, shape.limit).to(x.dtype), w["ffn.shared_experts.w2.weight"])
    return (routed.float() + shared.float()).to(x.dtype), chosen


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)`` in float32."""
    return functional.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)
