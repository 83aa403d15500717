"""Attention over a window and pooled entries, for whole sequences, with the indexer's choice as a mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from .layers import Weights, linear, rms
from .rotary import Angles, rotate
from .shape import Kind, Shape


@dataclass(frozen=True)
class Selection:
    """How the CSA layers see entries.

    Attributes:
        sparse: only the indexer's choice; else every visible entry.
        exact: the engine's rule for equal scores, lowest entry first; slower than any rule.
        learn: return the indexer's loss.
    """

    sparse: bool = True
    exact: bool = False
    learn: bool = False


def pool(x: torch.Tensor, w: Weights, prefix: str, rate: int, overlap: bool, table: Angles, eps: float) -> torch.Tensor:
    """``[B, T, D]`` -> entries ``[B, T // rate, width]`` of complete windows, normed and rotated.

    With overlap a window's entry also pools the first series of the window before it.
    """
    count = x.shape[1] // rate
    x = x[:, : count * rate]
    value = linear(x, w[f"{prefix}wkv.weight"]).float().view(len(x), count, rate, -1)
    gate = linear(x, w[f"{prefix}wgate.weight"]).float().view_as(value) + w[f"{prefix}ape"].float()
    if overlap:
        width = value.shape[-1] // 2
        before = value.new_zeros(value.shape[0], 1, rate, width)
        value = torch.cat((torch.cat((before, value[:, :-1, :, :width]), 1), value[..., width:]), 2)
        gate = torch.cat((torch.cat((before - float("inf"), gate[:, :-1, :, :width]), 1), gate[..., width:]), 2)
    pooled = (torch.softmax(gate, dim=2) * value).sum(2).to(x.dtype)
    first = (table[0][: count * rate : rate], table[1][: count * rate : rate])
    return rotate(rms(pooled, w[f"{prefix}norm.weight"], eps), first)


def index_scores(x: torch.Tensor, low: torch.Tensor, w: Weights, shape: Shape, table: Angles) -> torch.Tensor:
    """Scores ``[B, T, N]`` float32 of every entry for every query."""
    keys = pool(x, w, "attn.indexer.compressor.", shape.csa_rate, True, table, shape.eps)
    (b, t), h, d = x.shape[:2], shape.index_heads, shape.index_dim
    query = rotate(linear(low, w["attn.indexer.wq_b.weight"]).view(b, t, h, d), table)
    weights = linear(x, w["attn.indexer.weights_proj.weight"]).float() * (d * h) ** -0.5
    products = torch.relu(query.reshape(b, t * h, d) @ keys.transpose(1, 2)).view(b, t, h, -1).float()
    scores: torch.Tensor = (products * weights[..., None]).sum(2)
    return scores


def choose(scores: torch.Tensor, visible: torch.Tensor, top_k: int, exact: bool) -> torch.Tensor:
    """Mask ``[B, T, N]`` of the best ``top_k`` visible entries."""
    if scores.shape[-1] <= top_k:
        return visible.expand(scores.shape)
    ranked = scores.detach().masked_fill(~visible, float("-inf"))
    if exact:
        picks = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[..., :top_k]
    else:
        picks = ranked.topk(top_k, dim=-1, sorted=False).indices
    return torch.zeros_like(ranked, dtype=torch.bool).scatter(-1, picks, True) & visible


def attention(
    x: torch.Tensor,
    w: Weights,
    shape: Shape,
    kind: Kind,
    table: Angles,
    selection: Selection,
    dense: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[B, T, D]``, normed -> ``[B, T, D]``, and the indexer's loss (0 for layers without one, or when not asked).

    ``dense``: a bool ``[]`` that puts every visible entry back (the warm-up); a tensor, so that one compiled program
    serves both.
    """
    b, t, _ = x.shape
    loss = x.new_zeros((), dtype=torch.float32)
    low = rms(linear(x, w["attn.wq_a.weight"]), w["attn.q_norm.weight"], shape.eps)
    query = linear(low, w["attn.wq_b.weight"]).view(b, t, shape.heads, shape.head_dim)
    query = rotate(rms(query, None, shape.eps), table)
    kv = rotate(rms(linear(x, w["attn.wkv.weight"]), w["attn.kv_norm.weight"], shape.eps), table)
    entries, allowed, index = None, None, None
    if kind != "window":
        rate = shape.csa_rate if kind == "csa" else shape.hca_rate
        entries = pool(x, w, "attn.compressor.", rate, kind == "csa", table, shape.eps)
        closed = (torch.arange(t, device=x.device) + 1) // rate
        allowed = (torch.arange(entries.shape[1], device=x.device) < closed[:, None])[None]
        if kind == "csa" and (selection.sparse or selection.learn):
            # The choice has no gradient: the indexer learns from its own loss, and from that alone.
            index = index_scores(x.detach(), low.detach(), w, shape, table)
            if selection.sparse:
                picked = choose(index, allowed, shape.index_top_k, selection.exact)
                allowed = picked if dense is None else picked | (allowed & dense)
    attended, mass = _attend(query, kv, entries, allowed, w["attn.attn_sink"], shape)
    if index is not None and selection.learn and mass is not None and allowed is not None:
        loss = indexer_loss(index, mass, allowed)
    attended = rotate(attended, table, back=True)
    grouped = attended.reshape(b, t, shape.o_groups, -1)
    low_rank = w["attn.wo_a.weight"].to(x.dtype).view(shape.o_groups, shape.o_rank, -1)
    inner = torch.einsum("btgi,gri->btgr", grouped, low_rank).flatten(2)
    return linear(inner, w["attn.wo_b.weight"]), loss


def _attend(
    query: torch.Tensor,
    kv: torch.Tensor,
    entries: torch.Tensor | None,
    allowed: torch.Tensor | None,
    sink: torch.Tensor,
    shape: Shape,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Softmax over window rows, allowed entries and the sink: ``[B, T, H, d]``; mass on entries ``[B, T, N]``.

    Blocks of ``window`` queries see their own block of keys and the one before it.
    """
    b, t, h, d = query.shape
    size = shape.window
    blocks = -(-t // size)
    padded = functional.pad(query, (0, 0, 0, 0, 0, blocks * size - t)).view(b * blocks, size * h, d)
    keys = functional.pad(kv, (0, 0, size, blocks * size - t)).view(b, blocks + 1, size, d)
    keys = torch.cat((keys[:, :-1], keys[:, 1:]), dim=2).view(b * blocks, 2 * size, d)
    scores = (padded @ keys.transpose(1, 2)).view(b, blocks, size, h, 2 * size).float() * d**-0.5
    row = torch.arange(size, device=query.device)[:, None]
    column = torch.arange(2 * size, device=query.device) - size
    seen = (column <= row) & (column > row - size)
    first = torch.arange(blocks, device=query.device)[:, None, None] == 0
    seen = seen & ~(first & (column < 0))
    scores = scores.masked_fill(~seen[None, :, :, None, :], float("-inf"))
    scores = scores.view(b, blocks * size, h, 2 * size)[:, :t]
    top = torch.maximum(scores.detach().amax(-1), sink.detach())
    far = None
    if entries is not None and allowed is not None and entries.shape[1]:
        far = (query.reshape(b, t * h, d) @ entries.transpose(1, 2)).view(b, t, h, -1).float() * d**-0.5
        far = far.masked_fill(~allowed[:, :, None, :], float("-inf"))
        top = torch.maximum(top, far.detach().amax(-1))
    near = torch.exp(scores - top[..., None])
    total = near.sum(-1) + torch.exp(sink - top)
    mass = None
    if far is not None:
        far = torch.exp(far - top[..., None])
        total = total + far.sum(-1)
    near = functional.pad((near / total[..., None]).to(query.dtype), (0, 0, 0, 0, 0, blocks * size - t))
    out = (near.reshape(b * blocks, size * h, 2 * size) @ keys).view(b, blocks * size, h, d)[:, :t]
    if far is not None and entries is not None:
        far = far / total[..., None]
        mass = far.detach().sum(2)
        out = out + (far.to(query.dtype).reshape(b, t * h, -1) @ entries).view(b, t, h, d)
    return out, mass


def indexer_loss(index: torch.Tensor, mass: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """KL from the attention's share of each allowed entry, summed over heads, to the softmax of the index scores.

    Mean over queries that see an entry (DeepSeek-V3.2, "lightning indexer": the same in the dense warm-up, where all
    visible entries are allowed, and after it, where the chosen ones are).
    """
    some = allowed.any(-1).expand(index.shape[:2])
    target = mass / mass.sum(-1, keepdim=True).clamp(min=1e-9)
    # Rows without an entry would be all -inf: their softmax is taken over everything and not counted.
    masked = index.masked_fill(~(allowed | ~some[..., None]), float("-inf"))
    logprob = torch.log_softmax(masked, dim=-1).masked_fill(~allowed, 0.0)
    divergence = (target * (target.clamp(min=1e-9).log() - logprob)).sum(-1)
    return (divergence * some).sum() / some.sum().clamp(min=1)
