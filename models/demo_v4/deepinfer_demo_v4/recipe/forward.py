"""The whole model over whole sequences.

Parameters carry their released names, with one change: the routed experts of a layer are stacked, so that
``layers.3.ffn.experts.w1.weight [E, width, hidden]`` stands for ``layers.3.ffn.experts.{e}.w1.weight``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .attention import Selection, attention
from .layers import Weights, collapse, experts, linear, merge, mix, rms
from .rotary import Angles, angles
from .shape import Kind, Shape


@dataclass(frozen=True)
class Output:
    """``hidden [B, T, D]`` normed for the head; ``index_loss``, a mean over CSA layers; ``chosen``: experts of each
    layer, ``[B, T, K]``."""

    hidden: torch.Tensor
    index_loss: torch.Tensor
    chosen: list[torch.Tensor]


def block(
    streams: torch.Tensor,
    ids: torch.Tensor,
    w: Weights,
    table: Angles,
    shape: Shape,
    kind: Kind,
    selection: Selection,
    dense: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One layer: streams ``[B, T, M, D]`` -> streams, the indexer's loss, the chosen experts."""
    x, post, comb = mix(streams, w, "hc_attn_", shape)
    x, loss = attention(rms(x, w["attn_norm.weight"], shape.eps), w, shape, kind, table, selection, dense)
    streams = merge(streams, x, post, comb)
    x, post, comb = mix(streams, w, "hc_ffn_", shape)
    x, chosen = experts(rms(x, w["ffn_norm.weight"], shape.eps), ids, w, shape)
    return merge(streams, x, post, comb), loss, chosen


def layer_weights(weights: Weights, layer: int) -> Weights:
    """One layer's weights without their prefix."""
    prefix = f"layers.{layer}."
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def forward(
    weights: Weights,
    ids: torch.Tensor,
    shape: Shape,
    selection: Selection,
    dtype: torch.dtype = torch.float32,
    run: Callable[..., Any] = block,
    dense: torch.Tensor | None = None,
) -> Output:
    """Token ids ``[B, T]`` -> :class:`Output`; ``dtype`` of streams and products; ``run``: a compiled block."""
    tables = {kind: angles(shape, kind, ids.shape[1], ids.device) for kind in dict.fromkeys(shape.kinds)}
    streams = torch.nn.functional.embedding(ids, weights["embed.weight"]).to(dtype)
    streams = streams[:, :, None].repeat(1, 1, shape.streams, 1)
    losses, chosen = [], []
    for layer, kind in enumerate(shape.kinds):
        w = layer_weights(weights, layer)
        streams, loss, picked = run(streams, ids, w, tables[kind], shape, kind, selection, dense)
        chosen.append(picked)
        if kind == "csa":
            losses.append(loss)
    index_loss = torch.stack(losses).mean() if losses else streams.new_zeros((), dtype=torch.float32)
    return Output(collapse(streams, weights, shape), index_loss, chosen)


def logits(weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
    """``[..., D]`` -> ``[..., vocab]`` float32."""
    return linear(hidden, weights["head.weight"]).float()
