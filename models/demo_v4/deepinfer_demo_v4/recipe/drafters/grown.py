"""A block drafter gets more stages than it was trained with, and at first says what it said."""

from __future__ import annotations

import torch

from deepinfer_demo_v4.recipe.layers import Weights
from deepinfer_demo_v4.recipe.shape import Shape

from .modules import Kind, stage_prefix

SILENT = ("attn.wo_b.weight", "ffn.experts.w2.weight", "ffn.shared_experts.w2.weight")
"""What a stage adds to the streams comes out of these."""
KEPT = 8.0
"""Logit with which a new stage's mixing keeps each stream to itself: e^-8 of the others comes in."""


def grown(stored: Weights, kind: Kind, first: Weights, shape: Shape) -> Weights:
    """``stored`` with the stages that ``kind`` has more, spread between its own from the left.

    New ones are those of ``first`` (a module at the start of its training) that add nothing. What the first and the
    last stage alone have (projection, heads) stays with these. As it is where nothing is missing, or of one stage.
    """
    old = 1 + max(int(name.split(".")[1]) for name in stored)
    if kind.family == "mtp" or not 1 < old < kind.stages:
        return stored
    places = own_places(old, kind.stages)
    w: Weights = {}
    for name, tensor in stored.items():
        number, rest = name.removeprefix("mtp.").split(".", 1)
        w[stage_prefix(places[int(number)]) + rest] = tensor
    for stage in sorted(set(range(kind.stages)) - set(places)):
        prefix = stage_prefix(stage)
        w |= {name: _silent(name, tensor, shape) for name, tensor in first.items() if name.startswith(prefix)}
    return w


def own_places(old: int, new: int) -> list[int]:
    """Where ``old`` stages, two or more, stand among ``new``: the first first, the last last, others evenly between."""
    return [round(i * (new - 1) / (old - 1)) for i in range(old)]


def _silent(name: str, tensor: torch.Tensor, shape: Shape) -> torch.Tensor:
    m, part = shape.streams, name.rsplit(".", 1)[-1]
    if name.endswith(SILENT):
        return torch.zeros_like(tensor)
    changed = tensor.clone()
    if part in ("hc_attn_fn", "hc_ffn_fn"):
        changed[2 * m :] = 0.0
    if part in ("hc_attn_base", "hc_ffn_base"):
        changed[2 * m :] = (torch.eye(m) * KEPT).flatten()
    return changed
