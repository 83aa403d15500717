"""The operators the model needs, as slots of its table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from deepinfer_core.api import (
    BatchedLinearRequest,
    CheckpointError,
    CompressRequest,
    ConfigError,
    EmbeddingRequest,
    ExpertParallelRequest,
    GroupedLinearRequest,
    HyperConnectionRequest,
    HyperHeadRequest,
    IndexTopKRequest,
    LinearRequest,
    ModelOptions,
    MoeExchangeRequest,
    OpRequest,
    QdqFormat,
    QuantiseDequantiseRequest,
    RmsNormRequest,
    RopeRequest,
    RouteRequest,
    SparseAttentionRequest,
    SwigluRequest,
)

from .config import LayerKind, V4Config
from .groups import CSA, CSA_TAIL, HCA, HCA_TAIL, INDEX, INDEX_TAIL, WINDOW, wide
from .names import layer_prefix
from .tensors import StoredFormats

KV_FORMAT: QdqFormat = "fp8:e4m3"
KV_GROUP = 64
INDEX_FORMAT: QdqFormat = "fp4:e2m1"
INDEX_GROUP = 32


@attrs.frozen(kw_only=True)
class Needs:
    """Everything the requests are derived from.

    Attributes:
        prefixes: layers (or draft stages) with their kind and whether experts are chosen by table.
        max_model_len: tokens. qdq: round cached values as a packed cache would.
        window_group: cache group of the raw rows.
    """

    config: V4Config
    options: ModelOptions
    formats: StoredFormats
    prefixes: tuple[tuple[str, LayerKind, bool], ...]
    max_model_len: int
    qdq: bool
    window_group: str = WINDOW

    @property
    def common(self) -> dict[str, Any]:
        o = self.options
        return {"device_type": o.device_type, "demands": o.demands, "dtype": o.dtype}

    def of_kind(self, *kinds: LayerKind) -> list[str]:
        return [prefix for prefix, kind, _ in self.prefixes if kind in kinds]

    def stored_dtype(self, names: Iterable[str]) -> str:
        """The one format of these weights, which share a slot and so an operator."""
        found = {self.formats.weight_dtype(name): name for name in names}
        if len(found) > 1:
            listed = "; ".join(f"{name!r} is {dtype}" for dtype, name in sorted(found.items()))
            raise CheckpointError(f"weights of one kind are stored in different formats: {listed}")
        return next(iter(found), self.options.dtype)

    def linear(self, inp: int, out: int, names: Iterable[str], **changes: Any) -> LinearRequest:
        stored = self.stored_dtype(names)
        shape = {"in_features": inp, "out_features": out, "out_dtype": self.options.dtype, **self.common}
        packed = stored.startswith(("fp8:", "fp4:"))
        rounded = f"fp8:e4m3:{self.formats.block[1]}" if packed and self.options.fp8_activations else ""
        return LinearRequest(**(shape | {"weight_dtype": stored, "activations": rounded} | changes))


def main_prefixes(c: V4Config) -> tuple[tuple[str, LayerKind, bool], ...]:
    """The main model's layers."""
    return tuple(
        (layer_prefix(i), kind, hashed) for i, (kind, hashed) in enumerate(zip(c.kinds, c.hashed, strict=True))
    )


def model_requests(n: Needs) -> dict[str, OpRequest]:
    """Slots of the main model."""
    ops = embedding_and_head(n) | block_requests(n)
    for kind in ("csa", "hca"):
        if n.of_kind(kind):
            ops |= _csa_requests(n) if kind == "csa" else _hca_requests(n)
    return ops


def embedding_and_head(n: Needs) -> dict[str, OpRequest]:
    """The two ends, shared with the draft modules, and the streams' last sum."""
    c, w = n.config, wide(n.options.dtype)
    embedding = n.formats.dtype("embed.weight")
    return {
        "embedding": EmbeddingRequest(vocab_size=c.vocab, hidden=c.hidden, weight_dtype=embedding, **n.common),
        "hyper_head": HyperHeadRequest(streams=c.streams, hidden=c.hidden, eps=c.hyper_eps, norm_eps=c.eps, **n.common),
        "head": n.linear(c.hidden, c.vocab, ["head.weight"], out_dtype=w),
    }


def block_requests(n: Needs, *, causal: bool = True) -> dict[str, OpRequest]:
    """What every layer uses, and window attention."""
    c = n.config
    every = [prefix for prefix, _, _ in n.prefixes]
    attn = [f"{p}attn." for p in every]
    plain_q = [f"{p}attn.wq_b.weight" for p in n.of_kind("window", "hca")]
    group_width = c.heads // c.o_groups * c.head_dim
    ops: dict[str, OpRequest] = {
        "norm": RmsNormRequest(hidden=c.hidden, eps=c.eps, **n.common),
        "q_norm": RmsNormRequest(hidden=c.q_rank, eps=c.eps, **n.common),
        "head_norm": RmsNormRequest(hidden=c.head_dim, eps=c.eps, **n.common),
        "hyper": HyperConnectionRequest(
            streams=c.streams,
            hidden=c.hidden,
            iterations=c.sinkhorn_iterations,
            eps=c.hyper_eps,
            norm_eps=c.eps,
            **n.common,
        ),
        "qkv_a": n.linear(c.hidden, c.q_rank + c.head_dim, [f"{a}{w}.weight" for a in attn for w in ("wq_a", "wkv")]),
        "o_a": BatchedLinearRequest(
            groups=c.o_groups,
            in_features=group_width,
            out_features=c.o_rank,
            out_dtype=n.options.dtype,
            weight_dtype=n.stored_dtype(f"{a}wo_a.weight" for a in attn),
            **n.common,
        ),
        "o_b": n.linear(c.o_groups * c.o_rank, c.hidden, [f"{a}wo_b.weight" for a in attn]),
    }
    if plain_q:
        ops["q_b"] = n.linear(c.q_rank, c.heads * c.head_dim, plain_q)
    if n.of_kind("window"):
        ops["rope_window"] = _rope(n, "window", c.head_dim)
        ops["attention_window"] = attention(n, "window", "", 0, 0, causal=causal)
    if n.qdq:
        ops["qdq_kv"] = QuantiseDequantiseRequest(
            width=c.head_dim, format=KV_FORMAT, channels=kv_channels(c), group=KV_GROUP, **n.common
        )
    return ops | _expert_requests(n)


def attention(n: Needs, kind: LayerKind, entries: str, rate: int, chosen: int, **changes: Any) -> OpRequest:
    """Attention of one layer kind."""
    c = n.config
    return SparseAttentionRequest(
        cache_group=n.window_group,
        entry_group=entries,
        heads=c.heads,
        head_dim=c.head_dim,
        cache_dtype=n.options.dtype,
        scale=c.head_dim**-0.5,
        block_size=n.options.block_size,
        window=c.window,
        rate=rate,
        chosen=chosen,
        layer_kind=kind,
        **n.common,
        **changes,
    )


def kv_channels(c: V4Config) -> int:
    """Channels of a cached vector that are rounded: all but the rotated ones."""
    channels = c.head_dim - c.rotary_dim
    if channels % KV_GROUP or c.index_dim % INDEX_GROUP or c.index_dim & (c.index_dim - 1):
        raise ConfigError(
            f"config.json: head_dim={c.head_dim} less {c.rotary_dim} rotary channels, index_head_dim={c.index_dim}: "
            f"simulated quantisation needs multiples of {KV_GROUP} and a power of two from {INDEX_GROUP}; "
            "set model.qdq='off'"
        )
    return channels


def _rope(n: Needs, kind: LayerKind, head_dim: int) -> RopeRequest:
    c = n.config
    rope = c.rope_of(kind)
    return RopeRequest(
        head_dim=head_dim,
        rotary_dim=c.rotary_dim,
        theta=rope.theta,
        scaling=rope.scaling,
        max_positions=n.max_model_len,
        interleaved=True,
        trailing=True,
        layer_kind="window" if kind == "window" else "compressed",
        **n.common,
    )


def _compress(n: Needs, kind: LayerKind, groups: tuple[str, str], entry: str, width: int, qdq: Any) -> OpRequest:
    c = n.config
    rope = c.rope_of(kind)
    return CompressRequest(
        cache_group=groups[0],
        entry_group=groups[1],
        entry=entry,
        head_dim=width,
        rate=c.csa_rate if kind == "csa" else c.hca_rate,
        overlap=kind == "csa",
        cache_dtype=n.options.dtype,
        eps=c.eps,
        rotary_dim=c.rotary_dim,
        theta=rope.theta,
        scaling=rope.scaling,
        max_positions=n.max_model_len,
        block_size=n.options.block_size,
        layer_kind=kind,
        **qdq,
        **n.common,
    )


def _kv_qdq(n: Needs) -> Mapping[str, Any]:
    if not n.qdq:
        return {}
    return {"qdq": KV_FORMAT, "qdq_channels": kv_channels(n.config), "qdq_group": KV_GROUP}


def _csa_requests(n: Needs) -> dict[str, OpRequest]:
    c, w = n.config, wide(n.options.dtype)
    attn = [f"{p}attn." for p in n.of_kind("csa")]
    pools = [f"{a}{b}compressor.{x}.weight" for a in attn for b in ("", "indexer.") for x in ("wkv", "wgate")]
    rounded: dict[str, Any] = {"channels": c.index_dim, "group": INDEX_GROUP, "hadamard": True}
    qdq = {"qdq": INDEX_FORMAT, "qdq_channels": c.index_dim, "qdq_group": INDEX_GROUP, "hadamard": True}
    ops: dict[str, OpRequest] = {
        "q_b_csa": n.linear(
            c.q_rank,
            c.heads * c.head_dim + c.index_heads * c.index_dim,
            [f"{a}{b}wq_b.weight" for a in attn for b in ("", "indexer.")],
        ),
        "index_weights": n.linear(
            c.hidden, c.index_heads, [f"{a}indexer.weights_proj.weight" for a in attn], out_dtype=w
        ),
        "pool_csa": n.linear(c.hidden, 4 * (c.head_dim + c.index_dim), pools, dtype=w, out_dtype=w),
        "rope_compressed": _rope(n, "csa", c.head_dim),
        "rope_index": _rope(n, "csa", c.index_dim),
        "compress_csa": _compress(n, "csa", (CSA_TAIL, CSA), "kv", c.head_dim, _kv_qdq(n)),
        "compress_index": _compress(n, "csa", (INDEX_TAIL, INDEX), "key", c.index_dim, qdq if n.qdq else {}),
        "index_topk": IndexTopKRequest(
            cache_group=INDEX,
            heads=c.index_heads,
            head_dim=c.index_dim,
            top_k=c.index_top_k,
            rate=c.csa_rate,
            cache_dtype=n.options.dtype,
            scale=(c.index_dim * c.index_heads) ** -0.5,
            block_size=n.options.block_size,
            layer_kind="csa",
            **n.common,
        ),
        "attention_csa": attention(n, "csa", CSA, c.csa_rate, c.index_top_k),
    }
    if n.qdq:
        ops["qdq_index"] = QuantiseDequantiseRequest(width=c.index_dim, format=INDEX_FORMAT, **rounded, **n.common)
    return ops


def _hca_requests(n: Needs) -> dict[str, OpRequest]:
    c, w = n.config, wide(n.options.dtype)
    pools = [f"{p}attn.compressor.{x}.weight" for p in n.of_kind("hca") for x in ("wkv", "wgate")]
    return {
        "pool_hca": n.linear(c.hidden, 2 * c.head_dim, pools, dtype=w, out_dtype=w),
        "rope_compressed": _rope(n, "hca", c.head_dim),
        "compress_hca": _compress(n, "hca", (HCA_TAIL, HCA), "kv", c.head_dim, _kv_qdq(n)),
        "attention_hca": attention(n, "hca", HCA, c.hca_rate, 0),
    }


def _exchange(n: Needs) -> OpRequest:
    c, share = n.config, n.options.experts
    sizes = {"experts": c.experts, "top_k": c.experts_per_token, "hidden": c.hidden, **n.common}
    if share is None:
        return MoeExchangeRequest(**sizes)
    if share.placement.experts != c.experts:
        raise ConfigError(f"a placement of {share.placement.experts} experts; n_routed_experts is {c.experts}")
    return ExpertParallelRequest(ranks=share.placement.ranks, slots=share.placement.width, **sizes)


def _expert_requests(n: Needs) -> dict[str, OpRequest]:
    c, w = n.config, wide(n.options.dtype)
    ffn = [f"{p}ffn." for p, _, _ in n.prefixes]
    routed = [f"{f}experts.{e}." for f in ffn for e in range(c.experts)]
    route: dict[str, Any] = {
        "experts": c.experts,
        "top_k": c.experts_per_token,
        "scoring": c.scoring,
        "normalise": c.normalise,
        "scale": c.routed_scale,
        "device_type": n.options.device_type,
        "demands": n.options.demands,
    }
    share = n.options.experts
    grouped: dict[str, Any] = {"groups": c.experts if share is None else share.placement.width, **n.common}
    first, second = ("w1", "w3"), ("w2",)
    ops: dict[str, OpRequest] = {
        "router": n.linear(c.hidden, c.experts, [f"{f}gate.weight" for f in ffn], dtype=w, out_dtype=w),
        "exchange": _exchange(n),
        "expert_gate_up": GroupedLinearRequest(
            in_features=c.hidden,
            out_features=2 * c.expert_width,
            out_dtype=w,
            weight_dtype=n.stored_dtype(f"{r}{x}.weight" for r in routed for x in first),
            **grouped,
        ),
        "expert_down": GroupedLinearRequest(
            in_features=c.expert_width,
            out_features=c.hidden,
            out_dtype=n.options.dtype,
            weight_dtype=n.stored_dtype(f"{r}{x}.weight" for r in routed for x in second),
            **grouped,
        ),
        "shared_gate_up": n.linear(
            c.hidden, 2 * c.expert_width, [f"{f}shared_experts.{x}.weight" for f in ffn for x in first], out_dtype=w
        ),
        "shared_down": n.linear(c.expert_width, c.hidden, [f"{f}shared_experts.w2.weight" for f in ffn]),
        "swiglu": SwigluRequest(width=c.expert_width, limit=c.swiglu_limit, **(n.common | {"dtype": w})),
    }
    if any(hashed for _, _, hashed in n.prefixes):
        ops["route_hashed"] = RouteRequest(given=True, layer_kind="hash", **route)
    if not all(hashed for _, _, hashed in n.prefixes):
        ops["route"] = RouteRequest(bias=True, layer_kind="scored", **route)
    return ops
