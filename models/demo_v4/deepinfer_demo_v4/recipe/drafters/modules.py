"""The draft modules over whole sequences, differentiable: what starts them, and what they say.

Names are the released ones (``mtp.{stage}.*``) with experts stacked, as in ``deepinfer_demo_v4.recipe.forward``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from deepinfer_demo_v4.recipe.attention import Selection
from deepinfer_demo_v4.recipe.forward import block, layer_weights
from deepinfer_demo_v4.recipe.layers import Weights, coefficients, experts, linear, merge, mix, rms
from deepinfer_demo_v4.recipe.rotary import Angles
from deepinfer_demo_v4.recipe.shape import Shape

NOISE = 2
"""Token id of the rows after the anchor: padding, which no text has."""


@dataclass(frozen=True)
class Kind:
    """``family``: dspark, dflash (no heads) or mtp; ``stages``: layers; ``rank``: of the Markov head."""

    family: str
    stages: int
    rank: int

    @classmethod
    def of(cls, name: str, rank: int) -> Kind:
        """``dspark``, ``dflash-3``, ``mtp``: a family and how many stages, one when not said.

        Raises:
            ValueError: no such module.
        """
        family, _, stages = name.partition("-")
        if family not in ("dspark", "dflash", "mtp") or (family == "mtp" and stages):
            raise ValueError(f"module {name!r}: expected dspark, dflash (either with -3 for three stages), or mtp")
        return cls(family, int(stages or 1), rank if family == "dspark" else 0)


@dataclass(frozen=True)
class Blocks:
    """Anchors ``[N]`` in sequences ``rows [N]`` of a batch of texts."""

    rows: torch.Tensor
    anchors: torch.Tensor


def stage_prefix(stage: int) -> str:
    return f"mtp.{stage}."


def initial(kind: Kind, target: Weights, shape: Shape, taps: tuple[int, ...], seed: int) -> Weights:
    """Stages that begin as the target's last layers, without what only compressed layers have; of more stages than
    there are such layers the first ones begin alike.
    """
    generator = torch.Generator().manual_seed(seed)
    w: Weights = {}
    for stage in range(kind.stages):
        # Layers that look experts up by token are of no use to rows of noise.
        layer = layer_weights(target, max(shape.hashed, len(shape.kinds) - kind.stages + stage))
        kept = {n: t for n, t in layer.items() if ".compressor." not in n and ".indexer." not in n}
        w |= {stage_prefix(stage) + name: tensor.clone() for name, tensor in kept.items()}
    first, last, hidden = stage_prefix(0), stage_prefix(kind.stages - 1), shape.hidden
    w |= {last + name: target[name].clone() for name in ("hc_head_fn", "hc_head_base", "hc_head_scale", "norm.weight")}
    if kind.family == "mtp":
        w[first + "e_proj.weight"] = torch.eye(hidden) * 0.1
        w[first + "h_proj.weight"] = torch.eye(hidden)
        return w | {f"{first}{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm")}
    w[first + "main_proj.weight"] = torch.cat([torch.eye(hidden) / len(taps)] * len(taps), 1)
    w[first + "main_norm.weight"] = torch.ones(hidden)
    if kind.rank:
        scale = kind.rank**-0.5
        w[last + "markov_head.markov_w1.weight"] = torch.randn(shape.vocab, kind.rank, generator=generator) * scale
        w[last + "markov_head.markov_w2.weight"] = torch.randn(shape.vocab, kind.rank, generator=generator) * 0.02
        w[last + "confidence_head.proj.weight"] = torch.zeros(1, hidden + kind.rank)
    return w


def stage_weights(w: Weights, stage: int) -> Weights:
    """A stage's layer without its prefix: the same names for every stage, so that one compiled program serves all."""
    prefix = stage_prefix(stage)
    found = {n.removeprefix(prefix): t for n, t in w.items() if n.startswith(prefix)}
    return {n: t for n, t in found.items() if n.startswith(("attn", "ffn", "hc_attn", "hc_ffn"))}


def summed(streams: torch.Tensor, w: Weights, shape: Shape) -> torch.Tensor:
    """The streams' last sum, not normed: ``[..., M, D]`` -> ``[..., D]``."""
    z = coefficients(streams, w, "hc_head_", shape)
    pre = torch.sigmoid(z * w["hc_head_scale"] + w["hc_head_base"]) + shape.hyper_eps
    return (pre[..., None] * streams.float()).sum(2).to(streams.dtype)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the last channels of ``x [..., d]`` by angles that broadcast to ``[..., rotary / 2]``."""
    start = x.shape[-1] - 2 * cos.shape[-1]
    kept, turned = x[..., :start], x[..., start:].float()
    first, second = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    return torch.cat((kept, pairs.to(x.dtype)), dim=-1)


def injected(features: torch.Tensor, projection: torch.Tensor, norm: torch.Tensor, shape: Shape) -> torch.Tensor:
    """``[S, T, taps * D]`` -> what every stage's keys are made of, ``[S, T, D]``."""
    return rms(linear(features, projection), norm, shape.eps)


def block_attention(
    x: torch.Tensor, main: torch.Tensor, at: tuple[torch.Tensor, torch.Tensor], w: Weights, shape: Shape, table: Angles
) -> torch.Tensor:
    """``x [N, K, D]`` rows from each anchor on see one another and the window before it in ``main [S, T, D]``."""
    rows, anchors = at
    n, k, _ = x.shape
    own = anchors[:, None] + torch.arange(k, device=x.device)
    before = anchors[:, None] - shape.window + torch.arange(shape.window, device=x.device)
    t = main.shape[1]
    cached = rms(linear(main, w["attn.wkv.weight"]), w["attn.kv_norm.weight"], shape.eps)
    # Gathered in float32: the gradient of a gather adds up atomically, which bfloat16 does slowly and coarsely.
    cached = turn(cached, table[0][:t], table[1][:t]).float().flatten(0, 1)
    cached = cached[rows[:, None] * t + before.clamp(min=0)].to(x.dtype)
    cos, sin = table[0][own], table[1][own]
    fresh = turn(rms(linear(x, w["attn.wkv.weight"]), w["attn.kv_norm.weight"], shape.eps), cos, sin)
    odd = -(shape.window + k) % 8  # products of other sizes are slow on an accelerator
    kv = functional.pad(torch.cat((cached, fresh), 1), (0, 0, 0, odd))
    low = rms(linear(x, w["attn.wq_a.weight"]), w["attn.q_norm.weight"], shape.eps)
    query = linear(low, w["attn.wq_b.weight"]).view(n, k, shape.heads, shape.head_dim)
    query = turn(rms(query, None, shape.eps), cos[:, :, None], sin[:, :, None])
    scores = (query.flatten(1, 2) @ kv.mT).float().view(n, k, shape.heads, -1) * shape.head_dim**-0.5
    hidden = functional.pad(functional.pad(before < 0, (0, k)), (0, odd), value=True)
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    sink = w["attn.attn_sink"].view(1, 1, -1, 1).expand(n, k, -1, 1)
    weights = torch.softmax(torch.cat((scores, sink), -1), -1)[..., :-1].to(x.dtype)
    attended = (weights.flatten(1, 2) @ kv).view(n, k, shape.heads, -1)
    attended = turn(attended, cos[:, :, None], -sin[:, :, None])
    grouped = attended.reshape(n, k, shape.o_groups, -1)
    low_rank = w["attn.wo_a.weight"].to(x.dtype).view(shape.o_groups, shape.o_rank, -1)
    inner = torch.einsum("nkgi,gri->nkgr", grouped, low_rank).flatten(2)
    return linear(inner, w["attn.wo_b.weight"])


def stage(
    streams: torch.Tensor,
    main: torch.Tensor,
    at: tuple[torch.Tensor, torch.Tensor],
    w: Weights,
    shape: Shape,
    table: Angles,
) -> torch.Tensor:
    """One layer over blocks: streams ``[N, K, M, D]`` -> the same."""
    x, post, comb = mix(streams, w, "hc_attn_", shape)
    x = block_attention(rms(x, w["attn_norm.weight"], shape.eps), main, at, w, shape, table)
    streams = merge(streams, x, post, comb)
    x, post, comb = mix(streams, w, "hc_ffn_", shape)
    ids = torch.empty(streams.shape[:2], device=streams.device)  # no layer here looks experts up
    x, _ = experts(rms(x, w["ffn_norm.weight"], shape.eps), ids, w, shape)
    return merge(streams, x, post, comb)


def block_rows(
    kind: Kind,
    w: Weights,
    embedding: torch.Tensor,
    newest: torch.Tensor,
    features: torch.Tensor,
    blocks: Blocks,
    gamma: int,
    shape: Shape,
    table: Angles,
    run: Mapping[str, Callable[..., Any]],
) -> torch.Tensor:
    """What leaves the last stage, summed and not normed: ``[N, gamma, D]``.

    ``newest [N]``: the anchors' tokens; ``features [S, T, taps * D]`` of the batch that ``blocks`` points into;
    ``run``: ``inject`` and ``stage``, perhaps compiled.
    """
    first, last = stage_prefix(0), stage_prefix(kind.stages - 1)
    main = run["inject"](features, w[first + "main_proj.weight"], w[first + "main_norm.weight"], shape)
    ids = torch.full((len(newest), gamma), NOISE, device=newest.device)
    ids[:, 0] = newest
    streams = functional.embedding(ids, embedding).to(features.dtype)
    streams = streams[:, :, None].repeat(1, 1, shape.streams, 1)
    for i in range(kind.stages):
        streams = run["stage"](streams, main, (blocks.rows, blocks.anchors), stage_weights(w, i), shape, table)
    head = {n.removeprefix(last): t for n, t in w.items() if n.startswith(last + "hc_head_")}
    found: torch.Tensor = run["summed"](streams, head, shape)
    return found


def joined(token: torch.Tensor, streams: torch.Tensor, w: Weights, shape: Shape) -> torch.Tensor:
    """Embeddings ``[S, T, D]`` of the next tokens and streams ``[S, T, M, D]`` -> streams that enter the block."""
    token = linear(rms(token.to(streams.dtype), w["enorm"], shape.eps), w["e_proj"])
    return linear(rms(streams, w["hnorm"], shape.eps), w["h_proj"]) + token[:, :, None]


def mtp_rows(
    w: Weights,
    embedding: torch.Tensor,
    ids: torch.Tensor,
    streams: torch.Tensor,
    shape: Shape,
    table: Angles,
    run: Mapping[str, Callable[..., Any]],
) -> torch.Tensor:
    """``[S, T, D]``, summed and not normed: row t reads the target's streams of t and token t + 1.

    ``ids [S, T]`` are those next tokens, ``streams [S, T, M, D]``.
    """
    first = stage_prefix(0)
    own = {name: w[f"{first}{name}.weight"] for name in ("enorm", "hnorm", "e_proj", "h_proj")}
    x = run["joined"](functional.embedding(ids, embedding), streams, own, shape)
    cut = (table[0][: ids.shape[1]], table[1][: ids.shape[1]])
    x = run["block"](x, ids, stage_weights(w, 0), cut, shape, "window", Selection())[0]
    head = {n.removeprefix(first): t for n, t in w.items() if n.startswith(first + "hc_head_")}
    found: torch.Tensor = run["summed"](x, head, shape)
    return found


PROGRAMS: Mapping[str, Callable[..., Any]] = {
    "inject": injected,
    "stage": stage,
    "summed": summed,
    "joined": joined,
    "block": block,
}
"""The parts that are worth compiling, as they are."""
