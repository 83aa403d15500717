"""The target continues prompts, token by token with caches, and what it computed on the way is kept.

All sequences stand at the same position, so a cache is a tensor and a slice. Sequences are no longer than what the
indexer would take in full: it is left out, and the result is that of ``deepinfer_demo_v4.recipe.forward``
(``tests/spec_decode/test_drafter_recipe.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from deepinfer_demo_v4.recipe.forward import layer_weights
from deepinfer_demo_v4.recipe.layers import Weights, collapse, experts, linear, merge, mix, rms
from deepinfer_demo_v4.recipe.rotary import Angles, angles, rotate
from deepinfer_demo_v4.recipe.shape import Kind, Shape

GREEDY = 0.0


@dataclass(frozen=True)
class Text:
    """Sequences of the target's, and what it computed over them.

    ``ids [B, T]`` int64; ``temperature [B]`` float32 they were drawn at; ``features [B, T, taps * D]`` means over the
    streams leaving the tapped layers; ``streams [B, T, M, D]`` leaving the last; ``hidden [B, T, D]`` normed for the
    head. The last three lack the last position's, which nobody asked the target about: it is zero.
    """

    ids: torch.Tensor
    temperature: torch.Tensor
    features: torch.Tensor
    streams: torch.Tensor
    hidden: torch.Tensor

    def rows(self, index: torch.Tensor | slice) -> Text:
        return Text(*(getattr(self, f.name)[index] for f in fields(self)))

    @classmethod
    def noise(cls, count: int, length: int, taps: int, shape: Shape, dtype: torch.dtype, device: Any) -> Text:
        """Of the right sizes, for a rehearsal."""
        ids = torch.randint(shape.vocab, (count, length), device=device)
        sizes = ((taps * shape.hidden,), (shape.streams, shape.hidden), (shape.hidden,))
        parts = (torch.randn(count, length, *size, dtype=dtype, device=device) for size in sizes)
        return cls(ids, temperatures(count, device), *parts)

    @classmethod
    def room(cls, like: Text, count: int) -> Text:
        """Uninitialised, for ``count`` sequences."""
        return cls(*(t.new_empty(count, *t.shape[1:]) for t in (getattr(like, f.name) for f in fields(like))))

    def put(self, part: Text, start: int) -> None:
        for f in fields(self):
            getattr(self, f.name)[start : start + len(part.ids)] = getattr(part, f.name)


class LayerCache:
    """One layer's rows so far: raw ones, what the compressor pools, and finished entries."""

    def __init__(self, kind: Kind, count: int, length: int, shape: Shape, dtype: torch.dtype, device: Any) -> None:
        d = shape.head_dim
        self.kind = kind
        self.raw = torch.empty(count, length, d, dtype=dtype, device=device)
        if kind != "window":
            self.rate = shape.csa_rate if kind == "csa" else shape.hca_rate
            self.kept = self.rate * 2 if kind == "csa" else self.rate
            width = 2 * d if kind == "csa" else d
            # A ring of the last rows; before the first window there is nothing, whose gate is -inf.
            self.values = torch.zeros(count, self.kept, width, device=device)
            self.gates = torch.full((count, self.kept, width), -torch.inf, device=device)
            self.entries = torch.empty(count, length // self.rate, d, dtype=dtype, device=device)

    def pool(self, x: torch.Tensor, t: int, w: Weights, shape: Shape, table: Angles) -> None:
        """Take in row t ``[B, 1, D]``; where that completes a window, make its entry."""
        p, rate = "attn.compressor.", self.rate
        slot = t % self.kept
        self.values[:, slot] = linear(x[:, 0], w[f"{p}wkv.weight"]).float()
        self.gates[:, slot] = linear(x[:, 0], w[f"{p}wgate.weight"]).float() + w[f"{p}ape"][t % rate].float()
        if (t + 1) % rate:
            return
        now = [(t - rate + 1 + i) % self.kept for i in range(rate)]
        value, gate = self.values[:, now], self.gates[:, now]
        if self.kind == "csa":
            before, width = [(t - 2 * rate + 1 + i) % self.kept for i in range(rate)], shape.head_dim
            value = torch.cat((self.values[:, before, :width], value[..., width:]), 1)
            gate = torch.cat((self.gates[:, before, :width], gate[..., width:]), 1)
        pooled = (torch.softmax(gate, dim=1) * value).sum(1, keepdim=True).to(x.dtype)
        first = t - rate + 1
        cut = (table[0][first : first + 1], table[1][first : first + 1])
        self.entries[:, t // rate] = rotate(rms(pooled, w[f"{p}norm.weight"], shape.eps), cut)[:, 0]

    def attention(self, x: torch.Tensor, t: int, w: Weights, shape: Shape, table: Angles) -> torch.Tensor:
        """Row t ``[B, 1, D]``, normed -> ``[B, 1, D]``."""
        b, cut = len(x), (table[0][t : t + 1], table[1][t : t + 1])
        low = rms(linear(x, w["attn.wq_a.weight"]), w["attn.q_norm.weight"], shape.eps)
        query = linear(low, w["attn.wq_b.weight"]).view(b, 1, shape.heads, shape.head_dim)
        query = rotate(rms(query, None, shape.eps), cut)[:, 0]
        kv = rotate(rms(linear(x, w["attn.wkv.weight"]), w["attn.kv_norm.weight"], shape.eps), cut)
        self.raw[:, t] = kv[:, 0]
        seen = [self.raw[:, max(0, t - shape.window + 1) : t + 1]]
        if self.kind != "window":
            self.pool(x, t, w, shape, table)
            seen.append(self.entries[:, : (t + 1) // self.rate])
        keys = torch.cat(seen, 1)
        scores = (query @ keys.mT).float() * shape.head_dim**-0.5
        sink = w["attn.attn_sink"].view(1, -1, 1).expand(b, -1, -1)
        weights = torch.softmax(torch.cat((scores, sink), -1), -1)[..., :-1].to(x.dtype)
        attended = rotate((weights @ keys)[:, None], cut, back=True)
        low_rank = w["attn.wo_a.weight"].to(x.dtype).view(shape.o_groups, shape.o_rank, -1)
        inner = torch.einsum("btgi,gri->btgr", attended.reshape(b, 1, shape.o_groups, -1), low_rank).flatten(2)
        return linear(inner, w["attn.wo_b.weight"])


def temperatures(count: int, device: Any) -> torch.Tensor:
    """``[count]``: in turns of eight, four at 1, three greedy, and one at 0.5."""
    turn = torch.tensor([1.0, GREEDY, 1.0, GREEDY, 1.0, 0.5, 1.0, GREEDY], device=device)
    return turn.repeat(-(-count // len(turn)))[:count]


@torch.no_grad()
def write_text(
    w: Weights,
    prompts: torch.Tensor,
    length: int,
    taps: tuple[int, ...],
    shape: Shape,
    dtype: torch.dtype,
    seed: int,
    run: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
) -> Text:
    """``[B, P]`` int64 -> sequences of ``length`` tokens.

    ``run`` may compile what it is given.

    Raises:
        ValueError: the sequences are so long that the indexer would choose.
    """
    if length // shape.csa_rate > shape.index_top_k:
        raise ValueError(
            f"length {length}: the indexer takes {shape.index_top_k} of {length // shape.csa_rate} entries"
        )
    device, count = prompts.device, len(prompts)
    generator = torch.Generator(device).manual_seed(seed)
    temperature = temperatures(count, device)
    tables = {kind: angles(shape, kind, length, device) for kind in dict.fromkeys(shape.kinds)}
    layers = [layer_weights(w, i) for i in range(len(shape.kinds))]
    # Layers of different kinds show a compiled program the same names.
    before, after = (
        [_of(layer, names) for layer in layers] for names in (("hc_attn_", "attn_norm"), ("hc_ffn_", "ffn"))
    )
    ends = _of(w, ("hc_head_", "norm"))
    caches = [LayerCache(kind, count, length, shape, dtype, device) for kind in shape.kinds]
    ids = torch.zeros(count, length, dtype=torch.int64, device=device)
    ids[:, : prompts.shape[1]] = prompts
    hidden_size, m = shape.hidden, shape.streams
    features = torch.zeros(count, length, len(taps) * hidden_size, dtype=dtype, device=device)
    streams_out = torch.zeros(count, length, m, hidden_size, dtype=dtype, device=device)
    hidden_out = torch.zeros(count, length, hidden_size, dtype=dtype, device=device)
    enter, leave = run(_enter), run(_leave)
    finish = run(collapse)
    for t in range(length - 1):
        streams = torch.nn.functional.embedding(ids[:, t : t + 1], w["embed.weight"]).to(dtype)
        streams = streams[:, :, None].repeat(1, 1, m, 1)
        tapped = []
        for i, (weights, cache) in enumerate(zip(layers, caches, strict=True)):
            x, post, comb = enter(streams, before[i], shape)
            x = cache.attention(x, t, weights, shape, tables[cache.kind])
            streams = leave(streams, x, post, comb, ids[:, t : t + 1], after[i], shape)
            if i in taps:
                tapped.append(streams[:, 0].float().mean(1).to(dtype))
        hidden = finish(streams, ends, shape)[:, 0]
        features[:, t], streams_out[:, t], hidden_out[:, t] = torch.cat(tapped, -1), streams[:, 0], hidden
        if t + 1 >= prompts.shape[1]:
            logits = linear(hidden, w["head.weight"]).float()
            noise = torch.empty_like(logits).exponential_(generator=generator).log_()
            # argmax(logits / T - log noise), written so that T = 0 is greedy
            ids[:, t + 1] = logits.sub_(noise.mul_(temperature[:, None])).argmax(-1)
    return Text(ids, temperature, features, streams_out, hidden_out)


def _of(w: Weights, starts: tuple[str, ...]) -> Weights:
    return {name: tensor for name, tensor in w.items() if name.startswith(starts)}


def _enter(streams: torch.Tensor, w: Weights, shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, post, comb = mix(streams, w, "hc_attn_", shape)
    return rms(x, w["attn_norm.weight"], shape.eps), post, comb


def _leave(
    streams: torch.Tensor,
    x: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    ids: torch.Tensor,
    w: Weights,
    shape: Shape,
) -> torch.Tensor:
    streams = merge(streams, x, post, comb)
    x, post, comb = mix(streams, w, "hc_ffn_", shape)
    x, _ = experts(rms(x, w["ffn_norm.weight"], shape.eps), ids, w, shape)
    return merge(streams, x, post, comb)
