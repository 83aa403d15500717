"""Dense decoders: Llama (arXiv:2302.13971) and Qwen3 (arXiv:2505.09388).

One pre-norm decoder with grouped-query attention, rotary embedding and a gated feed-forward layer. What
differs between the two is read from config.json: Qwen3 normalises queries and keys per head, and may limit
some layers to a sliding window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import attrs
import torch

from deepinfer_core.api import (
    BetweenPart,
    BetweenWeights,
    CacheEntry,
    CacheGroupSpec,
    ConfigError,
    EmbeddingRequest,
    LinearRequest,
    ModelBatch,
    ModelContext,
    ModelOptions,
    ModelSpec,
    OpRequest,
    PagedAttentionRequest,
    RmsNormRequest,
    RopeRequest,
    SwigluRequest,
    TensorSpec,
    WriteKVRequest,
)

from .between_parts import BetweenByParts
from .config_fields import MOST_LAYERS, one_of, real, rope_fields, whole
from .dense_regions import dense_regions
from .plain_weights import refuse_companions
from .scaled_weights import STORED, SUFFIX, scaled_block, scales, widened

LayerKind = Literal["full", "window"]


@attrs.frozen(kw_only=True)
class DenseConfig:
    """The fields of config.json that matter, checked."""

    layers: int
    hidden: int
    intermediate: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    rope_scaling: Mapping[str, Any]
    max_positions: int
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool
    kinds: tuple[LayerKind, ...]
    window: int | None
    scaled: tuple[int, int] | None

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> DenseConfig:
        qwen3 = "Qwen3ForCausalLM" in config.get("architectures", ())
        one_of(config, "hidden_act", ("silu",), "silu")
        layers = whole(config, "num_hidden_layers", most=MOST_LAYERS)
        hidden, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
        kv_heads = whole(config, "num_key_value_heads", heads)
        head_dim = whole(config, "head_dim", hidden // heads)
        if heads % kv_heads:
            raise ConfigError(
                f"config.json: num_attention_heads={heads}: expected a multiple of num_key_value_heads={kv_heads}"
            )
        theta, scaling = rope_fields(config)
        kinds = _layer_kinds(config, layers)
        return cls(
            layers=layers,
            hidden=hidden,
            intermediate=whole(config, "intermediate_size"),
            vocab=whole(config, "vocab_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            eps=real(config, "rms_norm_eps", 1e-6),
            theta=theta,
            rope_scaling=scaling,
            max_positions=whole(config, "max_position_embeddings", 2048),
            tied=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=qwen3,
            kinds=kinds,
            window=whole(config, "sliding_window") if "window" in kinds else None,
            scaled=scaled_block(config),
        )


def _layer_kinds(config: Mapping[str, Any], layers: int) -> tuple[LayerKind, ...]:
    names: dict[str, LayerKind] = {"full_attention": "full", "sliding_attention": "window"}
    types = config.get("layer_types") or ["full_attention"] * layers
    if len(types) != layers or any(t not in names for t in types):
        raise ConfigError(f"config.json: layer_types={types!r}: expected {layers} of {', '.join(map(repr, names))}")
    return tuple(names[t] for t in types)


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def _tensors(c: DenseConfig) -> dict[str, TensorSpec]:
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab, c.hidden)}
    for layer in range(c.layers):
        p = _prefix(layer)
        shapes[p + "input_layernorm.weight"] = (c.hidden,)
        shapes[p + "post_attention_layernorm.weight"] = (c.hidden,)
        for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            shapes[f"{p}self_attn.{name}.weight"] = (rows, c.hidden)
            if c.attention_bias:
                shapes[f"{p}self_attn.{name}.bias"] = (rows,)
        shapes[p + "self_attn.o_proj.weight"] = (c.hidden, q)
        if c.attention_bias:
            shapes[p + "self_attn.o_proj.bias"] = (c.hidden,)
        if c.qk_norm:
            shapes[p + "self_attn.q_norm.weight"] = (c.head_dim,)
            shapes[p + "self_attn.k_norm.weight"] = (c.head_dim,)
        for name, out, inp in (
            ("gate_proj", c.intermediate, c.hidden),
            ("up_proj", c.intermediate, c.hidden),
            ("down_proj", c.hidden, c.intermediate),
        ):
            shapes[f"{p}mlp.{name}.weight"] = (out, inp)
            if c.mlp_bias:
                shapes[f"{p}mlp.{name}.bias"] = (out,)
    shapes["model.norm.weight"] = (c.hidden,)
    if not c.tied:
        shapes["lm_head.weight"] = (c.vocab, c.hidden)
    return {name: TensorSpec(shape=shape) for name, shape in shapes.items()}


def _requests(c: DenseConfig, o: ModelOptions, max_model_len: int) -> dict[str, OpRequest]:
    common: dict[str, Any] = {"device_type": o.device_type, "demands": o.demands, "dtype": o.dtype}

    def stored(name: str) -> str:
        found = o.stored.get(name, o.dtype)
        return o.dtype if c.scaled and found == STORED else found  # as it is handed over

    def linear(name: str, inp: int, out: int, bias: bool, out_dtype: str = o.dtype) -> LinearRequest:
        return LinearRequest(
            in_features=inp, out_features=out, out_dtype=out_dtype, weight_dtype=stored(name), bias=bias, **common
        )

    first, q, kv = _prefix(0), c.heads * c.head_dim, c.kv_heads * c.head_dim
    head = "model.embed_tokens.weight" if c.tied else "lm_head.weight"
    ops: dict[str, OpRequest] = {
        "embedding": EmbeddingRequest(
            vocab_size=c.vocab,
            hidden=c.hidden,
            weight_dtype=stored("model.embed_tokens.weight"),
            **common,
        ),
        "norm": RmsNormRequest(hidden=c.hidden, eps=c.eps, **common),
        "qkv": linear(first + "self_attn.q_proj.weight", c.hidden, q + 2 * kv, c.attention_bias),
        "attention_out": linear(first + "self_attn.o_proj.weight", q, c.hidden, c.attention_bias),
        "gate_up": linear(first + "mlp.gate_proj.weight", c.hidden, 2 * c.intermediate, c.mlp_bias),
        "down": linear(first + "mlp.down_proj.weight", c.intermediate, c.hidden, c.mlp_bias),
        "head": linear(head, c.hidden, c.vocab, False, "float32"),
        "swiglu": SwigluRequest(width=c.intermediate, **common),
        "rope": RopeRequest(
            head_dim=c.head_dim,
            rotary_dim=c.head_dim,
            theta=c.theta,
            scaling=c.rope_scaling,
            max_positions=max_model_len,
            **common,
        ),
    }
    if c.qk_norm:
        ops["head_norm"] = RmsNormRequest(hidden=c.head_dim, eps=c.eps, **common)
    for kind in dict.fromkeys(c.kinds):
        shape: dict[str, Any] = {
            "kv_heads": c.kv_heads,
            "head_dim": c.head_dim,
            "cache_dtype": o.cache_dtype or o.dtype,
            "block_size": o.block_size,
            "layer_kind": kind,
            "cache_group": kind,
            **common,
        }
        ops[f"write_kv_{kind}"] = WriteKVRequest(**shape)
        ops[f"attention_{kind}"] = PagedAttentionRequest(
            q_heads=c.heads, scale=c.head_dim**-0.5, window=c.window if kind == "window" else None, **shape
        )
    return ops


@attrs.frozen(kw_only=True)
class DenseLayer:
    """Weights and operators of one decoder layer. ``inputs`` and ``write_kv``: one is None, the other serves.

    ``behind``: what its attention's result goes through, up to the next layer's queries, keys and values.
    """

    kind: LayerKind
    cache_index: int
    inputs: Any
    write_kv: Any
    attention: Any
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    behind: BetweenWeights


class DenseModel:
    """Llama and Qwen3 causal language models."""

    def __init__(self, config: DenseConfig, spec: ModelSpec, ops: Any, parts: Mapping[str, Any]) -> None:
        self.config = config
        self.spec = spec
        self.ops = ops
        self.layers: list[DenseLayer] = parts["layers"]
        self.embedding_weight = parts["embedding"]
        self.head_weight = parts["head"]
        self.first_norm: torch.Tensor = parts["first_norm"]
        self.first_qkv = parts["first_qkv"]
        self.between = parts["between"]
        self._kinds = tuple(dict.fromkeys(config.kinds))
        self._rope = getattr(ops, "rope", None)

    @classmethod
    def describe(cls, config: Mapping[str, Any], options: ModelOptions) -> ModelSpec:
        c = DenseConfig.read(config)
        max_model_len = min(options.max_model_len or c.max_positions, c.max_positions)
        row = (c.kv_heads, c.head_dim)
        kept = options.cache_dtype or options.dtype
        entries = (CacheEntry("key", row, kept), CacheEntry("value", row, kept))
        groups = tuple(
            CacheGroupSpec(
                name=kind,
                kind=kind,
                layers=c.kinds.count(kind),
                entries=entries,
                window=c.window if kind == "window" else None,
            )
            for kind in dict.fromkeys(c.kinds)
        )
        ops = _requests(c, options, max_model_len)
        tensors = _tensors(c)
        if c.scaled:
            tensors |= scales(tensors, options.stored, c.scaled)
        refuse_companions(tensors, options.stored)
        return ModelSpec(
            architecture="Qwen3ForCausalLM" if c.qk_norm else "LlamaForCausalLM",
            vocab_size=c.vocab,
            max_model_len=max_model_len,
            dtype=options.dtype,
            num_layers=c.layers,
            hidden_size=c.hidden,
            cache_groups=groups,
            ops=ops,
            regions=dense_regions(c, ops),
            tensors=tensors,
        )

    @classmethod
    def build(cls, context: ModelContext) -> DenseModel:
        c, ops = DenseConfig.read(context.config), context.ops
        dtype = getattr(torch, context.spec.dtype)

        def read(name: str) -> torch.Tensor:
            tensor = context.weights.load(name)
            context.progress(name)
            if c.scaled and name + SUFFIX in context.spec.tensors:
                tensor = widened(tensor, read(name + SUFFIX), c.scaled, dtype)
            return tensor

        def vector(name: str) -> torch.Tensor:
            return read(name).to(context.device, dtype)

        between: Any = getattr(ops, "between_attention", None) or BetweenByParts(ops)

        def pack(part: BetweenPart, prefix: str, names: tuple[str, ...], bias: bool) -> Any:
            weights = [read(f"{prefix}{name}.weight") for name in names]
            return between.prepare(
                part, weights, torch.cat([vector(f"{prefix}{n}.bias") for n in names]) if bias else None
            )

        embedding = read("model.embed_tokens.weight")
        parts: dict[str, Any] = {"embedding": ops.embedding.prepare(embedding)}
        parts["head"] = ops.head.prepare([embedding if c.tied else read("lm_head.weight")])
        del embedding
        norms, inputs, rest = [], [], []
        for index in range(c.layers):
            p = _prefix(index)
            norms.append(vector(p + "input_layernorm.weight"))
            inputs.append(pack("qkv", p + "self_attn.", ("q_proj", "k_proj", "v_proj"), c.attention_bias))
            rest.append(
                {
                    "attention_out": pack("attention_out", p + "self_attn.", ("o_proj",), c.attention_bias),
                    "norm": vector(p + "post_attention_layernorm.weight"),
                    "gate_up": pack("gate_up", p + "mlp.", ("gate_proj", "up_proj"), c.mlp_bias),
                    "down": pack("down", p + "mlp.", ("down_proj",), c.mlp_bias),
                }
            )
        norms.append(vector("model.norm.weight"))
        parts |= {"between": between, "first_norm": norms[0], "first_qkv": inputs[0]}
        seen = {"full": 0, "window": 0}
        layers = parts["layers"] = []
        for index, kind in enumerate(c.kinds):
            p = _prefix(index) + "self_attn."
            layers.append(
                DenseLayer(
                    kind=kind,
                    cache_index=seen[kind],
                    inputs=getattr(ops, f"attention_inputs_{kind}", None),
                    write_kv=getattr(ops, f"write_kv_{kind}", None),
                    attention=getattr(ops, f"attention_{kind}"),
                    q_norm=vector(p + "q_norm.weight") if c.qk_norm else None,
                    k_norm=vector(p + "k_norm.weight") if c.qk_norm else None,
                    behind=BetweenWeights(
                        next_norm=norms[index + 1],
                        next_qkv=inputs[index + 1] if index + 1 < c.layers else None,
                        **rest[index],
                    ),
                )
            )
            seen[kind] += 1
        return cls(c, context.spec, ops, parts)

    def plan(self, batch: ModelBatch) -> dict[str, Any]:
        plans: dict[str, Any] = {
            kind: getattr(self.ops, f"attention_{kind}").plan(batch.layouts[kind]) for kind in self._kinds
        }
        if self._rope is not None:
            plans["rope"] = self._rope.plan(batch.positions)
        for kind in self._kinds:
            inputs = getattr(self.ops, f"attention_inputs_{kind}", None)
            if inputs is not None:
                plans[f"inputs_{kind}"] = inputs.plan(batch.layouts[kind])
        return plans

    def forward(self, batch: ModelBatch, plan: dict[str, Any]) -> torch.Tensor:
        return self.forward_tapped(batch, plan, ())[0]

    def forward_tapped(
        self,
        batch: ModelBatch,
        plan: dict[str, Any],
        taps: Sequence[int],
        keep: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """What :meth:`forward` returns, and ``keep`` of the residual sums ``[T, hidden]`` leaving layers ``taps``."""
        tapped = {}
        residual = self.ops.embedding.run(batch.token_ids, self.embedding_weight)
        x = self.between.first(residual, self.first_norm, self.first_qkv)
        for index, layer in enumerate(self.layers):
            attended = self._attended(x, layer, batch, plan)
            x, residual = self.between.run(attended, residual, layer.behind)
            if index in taps:
                tapped[index] = keep(residual)  # the next layer may overwrite it
        return x, [tapped[index] for index in taps]

    def _attended(self, qkv: torch.Tensor, layer: DenseLayer, batch: ModelBatch, plan: dict[str, Any]) -> torch.Tensor:
        c, ops = self.config, self.ops
        rows = qkv.shape[0]
        cache = batch.caches[layer.kind][layer.cache_index]
        if layer.inputs is not None:
            query = layer.inputs.run(qkv, cache, plan[f"inputs_{layer.kind}"], layer.q_norm, layer.k_norm)
        else:
            heads: Any = qkv.view(rows, c.heads + 2 * c.kv_heads, c.head_dim)
            query, key, value = heads.split((c.heads, c.kv_heads, c.kv_heads), dim=1)
            if layer.q_norm is not None:
                query, key = ops.head_norm.run(query, layer.q_norm), ops.head_norm.run(key, layer.k_norm)
            query, key = ops.rope.run(query, plan["rope"]), ops.rope.run(key, plan["rope"])
            layer.write_kv.run(key, value, cache, batch.layouts[layer.kind])
        attended: torch.Tensor = layer.attention.run(query, cache, plan[layer.kind])
        return attended.reshape(rows, c.heads * c.head_dim)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.ops.head.run(hidden, self.head_weight)
        return logits
