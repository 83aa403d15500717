"""DSpark and DFlash drafters for Qwen3 targets, in the public DeepSpec checkpoint format (arXiv:2607.05147).

A few transformer layers whose rows, the newest token and mask tokens behind it, see one another and, as keys and values
projected from layers of the target, every token before. DFlash is the same without Markov head and confidence head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from deepinfer_core.api import (
    CacheEntry,
    CacheGroupSpec,
    ConfigError,
    DraftModuleSpec,
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

from .config_fields import whole
from .dense import DenseConfig
from .drafted_block import Choose, DraftedBlock, greedy
from .plain_weights import refuse_companions

ARCHITECTURE = "Qwen3DSparkModel"
GROUP = "context"


@attrs.frozen(kw_only=True)
class DraftConfig:
    """The draft layers' own sizes are ``base``. ``rank`` 0: no Markov head. ``tied_confidence``: it reads the Markov
    embedding too."""

    base: DenseConfig
    block: int
    mask_token: int
    taps: tuple[int, ...]
    rank: int
    confidence: bool
    tied_confidence: bool

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> DraftConfig:
        """Raises ConfigError that names the field."""
        base = DenseConfig.read({**config, "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False})
        if set(base.kinds) != {"full"}:
            raise ConfigError("config.json: layer_types: a draft module has 'full_attention' layers only")
        taps = config.get("target_layer_ids")
        if not isinstance(taps, list) or not taps or any(type(t) is not int or t < 0 for t in taps):
            raise ConfigError(f"config.json: target_layer_ids={taps!r}: expected layer numbers >= 0")
        rank = config.get("markov_rank", 0)
        if type(rank) is not int or rank < 0:
            raise ConfigError(f"config.json: markov_rank={rank!r}: expected an integer >= 0")
        kind = config.get("markov_head_type", "vanilla")
        if rank and kind != "vanilla":
            raise ConfigError(f"config.json: markov_head_type={kind!r}: expected 'vanilla'")
        mask = config.get("mask_token_id")
        if type(mask) is not int or not 0 <= mask < base.vocab:
            raise ConfigError(f"config.json: mask_token_id={mask!r}: expected a token id below {base.vocab}")
        confidence = bool(config.get("enable_confidence_head", False))
        tied = confidence and bool(config.get("confidence_head_with_markov", False))
        if tied and not rank:
            raise ConfigError("config.json: confidence_head_with_markov=true: expected a markov_rank above 0")
        return cls(
            base=base,
            block=whole(config, "block_size"),
            mask_token=mask,
            taps=tuple(taps),
            rank=rank,
            confidence=confidence,
            tied_confidence=tied,
        )

    @property
    def confidence_width(self) -> int:
        return self.base.hidden + (self.rank if self.tied_confidence else 0)


def _tensors(c: DraftConfig) -> dict[str, TensorSpec]:
    b = c.base
    q, kv = b.heads * b.head_dim, b.kv_heads * b.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (b.vocab, b.hidden),
        "lm_head.weight": (b.vocab, b.hidden),
        "fc.weight": (b.hidden, len(c.taps) * b.hidden),
        "hidden_norm.weight": (b.hidden,),
        "norm.weight": (b.hidden,),
    }
    for layer in range(b.layers):
        p = f"layers.{layer}."
        shapes |= {p + "input_layernorm.weight": (b.hidden,), p + "post_attention_layernorm.weight": (b.hidden,)}
        for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            shapes[f"{p}self_attn.{name}.weight"] = (rows, b.hidden)
            if b.attention_bias:
                shapes[f"{p}self_attn.{name}.bias"] = (rows,)
        shapes[p + "self_attn.o_proj.weight"] = (b.hidden, q)
        if b.attention_bias:
            shapes[p + "self_attn.o_proj.bias"] = (b.hidden,)
        shapes |= {p + "self_attn.q_norm.weight": (b.head_dim,), p + "self_attn.k_norm.weight": (b.head_dim,)}
        shapes |= {f"{p}mlp.{name}.weight": (b.intermediate, b.hidden) for name in ("gate_proj", "up_proj")}
        shapes[p + "mlp.down_proj.weight"] = (b.hidden, b.intermediate)
    if c.rank:
        shapes |= {f"markov_head.markov_w{i}.weight": (b.vocab, c.rank) for i in (1, 2)}
    if c.confidence:
        shapes |= {"confidence_head.proj.weight": (1, c.confidence_width), "confidence_head.proj.bias": (1,)}
    return {name: TensorSpec(shape=shape) for name, shape in shapes.items()}


def _requests(c: DraftConfig, o: ModelOptions, max_model_len: int) -> dict[str, OpRequest]:
    b, wide = c.base, "float64" if o.dtype == "float64" else "float32"
    common: dict[str, Any] = {"device_type": o.device_type, "demands": o.demands, "dtype": o.dtype}

    def linear(name: str, inp: int, out: int, bias: bool = False, out_dtype: str = o.dtype) -> LinearRequest:
        stored = o.stored.get(name, o.dtype)
        return LinearRequest(
            in_features=inp, out_features=out, out_dtype=out_dtype, weight_dtype=stored, bias=bias, **common
        )

    first, q, kv = "layers.0.", b.heads * b.head_dim, b.kv_heads * b.head_dim
    shape: dict[str, Any] = {
        "kv_heads": b.kv_heads,
        "head_dim": b.head_dim,
        "cache_dtype": o.dtype,
        "block_size": o.block_size,
        "layer_kind": "draft",
        "cache_group": GROUP,
        **common,
    }
    embedding = o.stored.get("embed_tokens.weight", o.dtype)
    ops: dict[str, OpRequest] = {
        "embedding": EmbeddingRequest(vocab_size=b.vocab, hidden=b.hidden, weight_dtype=embedding, **common),
        "head": linear("lm_head.weight", b.hidden, b.vocab, out_dtype=wide),
        "features": linear("fc.weight", len(c.taps) * b.hidden, b.hidden),
        "norm": RmsNormRequest(hidden=b.hidden, eps=b.eps, **common),
        "head_norm": RmsNormRequest(hidden=b.head_dim, eps=b.eps, **common),
        "q": linear(first + "self_attn.q_proj.weight", b.hidden, q, b.attention_bias),
        "kv": linear(first + "self_attn.k_proj.weight", b.hidden, 2 * kv, b.attention_bias),
        "attention_out": linear(first + "self_attn.o_proj.weight", q, b.hidden, b.attention_bias),
        "gate_up": linear(first + "mlp.gate_proj.weight", b.hidden, 2 * b.intermediate),
        "down": linear(first + "mlp.down_proj.weight", b.intermediate, b.hidden),
        "swiglu": SwigluRequest(width=b.intermediate, **common),
        "rope": RopeRequest(
            head_dim=b.head_dim,
            rotary_dim=b.head_dim,
            theta=b.theta,
            scaling=b.rope_scaling,
            max_positions=max_model_len,
            **common,
        ),
        "write_kv": WriteKVRequest(**shape),
        "attention": PagedAttentionRequest(q_heads=b.heads, scale=b.head_dim**-0.5, causal=False, **shape),
    }
    if c.rank:
        table, second = (f"markov_head.markov_w{i}.weight" for i in (1, 2))
        dtype = o.stored.get(table, o.dtype)
        ops["markov_table"] = EmbeddingRequest(vocab_size=b.vocab, hidden=c.rank, weight_dtype=dtype, **common)
        ops["markov_out"] = linear(second, c.rank, b.vocab, out_dtype=wide)
    if c.confidence:
        ops["confidence"] = linear("confidence_head.proj.weight", c.confidence_width, 1, True, wide)
    return ops


@attrs.frozen(kw_only=True, eq=False)
class DraftLayer:
    """Weights of one draft layer; norms in the compute dtype."""

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    q: Any
    kv: Any
    out: Any
    gate_up: Any
    down: Any


class Qwen3DSpark:
    """The module: :meth:`inject` keeps what it reads of the target, :meth:`draft` drafts a block from there."""

    def __init__(self, config: DraftConfig, spec: ModelSpec, ops: Any, parts: Mapping[str, Any]) -> None:
        self.config = config
        self.spec = spec
        self.ops = ops
        self.parts = parts
        self.layers: Sequence[DraftLayer] = parts["layers"]

    @classmethod
    def describe(cls, config: Mapping[str, Any], options: ModelOptions) -> ModelSpec:
        c = DraftConfig.read(config)
        b = c.base
        max_model_len = min(options.max_model_len or b.max_positions, b.max_positions)
        row = (b.kv_heads, b.head_dim)
        entries = (CacheEntry("key", row, options.dtype), CacheEntry("value", row, options.dtype))
        tensors = _tensors(c)
        refuse_companions(tensors, options.stored)
        return ModelSpec(
            architecture=ARCHITECTURE,
            vocab_size=b.vocab,
            max_model_len=max_model_len,
            dtype=options.dtype,
            num_layers=b.layers,
            hidden_size=b.hidden,
            cache_groups=(CacheGroupSpec(name=GROUP, layers=b.layers, entries=entries),),
            ops=_requests(c, options, max_model_len),
            tensors=tensors,
            draft=DraftModuleSpec(taps=c.taps, max_drafts=c.block),
        )

    @classmethod
    def build(cls, context: ModelContext) -> Qwen3DSpark:
        c, ops = DraftConfig.read(context.config), context.ops
        dtype = getattr(torch, context.spec.dtype)

        def read(name: str) -> torch.Tensor:
            tensor = context.weights.load(name)
            context.progress(name)
            return tensor

        def vector(name: str) -> torch.Tensor:
            return read(name).to(context.device, dtype)

        def linear(op: Any, prefix: str, names: tuple[str, ...], bias: bool = False) -> Any:
            weights = [read(f"{prefix}{name}.weight") for name in names]
            return op.prepare(weights, torch.cat([vector(f"{prefix}{n}.bias") for n in names]) if bias else None)

        biased = c.base.attention_bias
        layers = []
        for layer in range(c.base.layers):
            p = f"layers.{layer}."
            layers.append(
                DraftLayer(
                    input_norm=vector(p + "input_layernorm.weight"),
                    post_norm=vector(p + "post_attention_layernorm.weight"),
                    q_norm=vector(p + "self_attn.q_norm.weight"),
                    k_norm=vector(p + "self_attn.k_norm.weight"),
                    q=linear(ops.q, p + "self_attn.", ("q_proj",), biased),
                    kv=linear(ops.kv, p + "self_attn.", ("k_proj", "v_proj"), biased),
                    out=linear(ops.attention_out, p + "self_attn.", ("o_proj",), biased),
                    gate_up=linear(ops.gate_up, p + "mlp.", ("gate_proj", "up_proj")),
                    down=linear(ops.down, p + "mlp.", ("down_proj",)),
                )
            )
        parts: dict[str, Any] = {
            "layers": layers,
            "embedding": ops.embedding.prepare(read("embed_tokens.weight")),
            "head": ops.head.prepare([read("lm_head.weight")]),
            "features": linear(ops.features, "", ("fc",)),
            "hidden_norm": vector("hidden_norm.weight"),
            "norm": vector("norm.weight"),
        }
        if c.rank:
            parts["markov_table"] = ops.markov_table.prepare(read("markov_head.markov_w1.weight"))
            parts["markov_out"] = linear(ops.markov_out, "markov_head.", ("markov_w2",))
        if c.confidence:
            parts["confidence"] = linear(ops.confidence, "confidence_head.", ("proj",), True)
        return cls(c, context.spec, ops, parts)

    def plan(self, batch: ModelBatch) -> dict[str, Any]:
        return {"attention": self.ops.attention.plan(batch.layouts[GROUP]), "rope": self.ops.rope.plan(batch.positions)}

    def plan_context(self, batch: ModelBatch) -> dict[str, Any]:
        """What :meth:`inject` needs of a step: it attends to nothing."""
        return {"rope": self.ops.rope.plan(batch.positions)}

    def inject(self, taps: Sequence[torch.Tensor], batch: ModelBatch, plan: dict[str, Any]) -> None:
        """Keys and values of positions that the target has processed.

        Args:
            taps: ``[T, hidden]`` leaving each of the target's layers.
            batch: the rows' positions and this module's layouts; the token ids are not read.
        """
        ops, parts = self.ops, self.parts
        features = ops.features.run(torch.cat(list(taps), dim=-1), parts["features"])
        context = ops.norm.run(features, parts["hidden_norm"])
        for index, layer in enumerate(self.layers):
            self._write(context, layer, index, batch, plan)

    def forward(self, batch: ModelBatch, plan: dict[str, Any]) -> torch.Tensor:
        """``[T, hidden]``, normed, of ``block`` rows a request: the newest token, then mask tokens.

        Their cached rows are overwritten when these positions are injected.
        """
        ops, b, parts = self.ops, self.config.base, self.parts
        residual = ops.embedding.run(batch.token_ids, parts["embedding"])
        x = ops.norm.run(residual, self.layers[0].input_norm)
        for index, layer in enumerate(self.layers):
            self._write(x, layer, index, batch, plan)
            query = ops.q.run(x, layer.q).view(-1, b.heads, b.head_dim)
            query = ops.rope.run(ops.head_norm.run(query, layer.q_norm), plan["rope"])
            attended = ops.attention.run(query, batch.caches[GROUP][index], plan["attention"])
            x = ops.attention_out.run(attended.reshape(-1, b.heads * b.head_dim), layer.out)
            x, residual = ops.norm.add(x, residual, layer.post_norm)
            x = ops.down.run(ops.swiglu.run(ops.gate_up.run(x, layer.gate_up)), layer.down)
            last = index + 1 == len(self.layers)
            x, residual = ops.norm.add(x, residual, parts["norm"] if last else self.layers[index + 1].input_norm)
        hidden: torch.Tensor = x
        return hidden

    def _write(self, x: torch.Tensor, layer: DraftLayer, index: int, batch: ModelBatch, plan: dict[str, Any]) -> None:
        ops, b = self.ops, self.config.base
        key, value = ops.kv.run(x, layer.kv).view(-1, 2 * b.kv_heads, b.head_dim).split(b.kv_heads, dim=1)
        key = ops.rope.run(ops.head_norm.run(key, layer.k_norm), plan["rope"])
        ops.write_kv.run(key, value, batch.caches[GROUP][index], batch.layouts[GROUP])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[N, hidden]`` -> ``[N, vocab_size]`` float32, before the Markov head."""
        logits: torch.Tensor = self.ops.head.run(hidden, self.parts["head"])
        return logits

    def draft(
        self, batch: ModelBatch, plan: dict[str, Any], depth: int | None = None, choose: Choose = greedy
    ) -> DraftedBlock:
        """The first ``depth`` tokens of every request's block, each chosen knowing the one before it."""
        c, ops, parts = self.config, self.ops, self.parts
        hidden = self.forward(batch, plan)
        logits = self.logits(hidden).view(-1, c.block, c.base.vocab)
        hidden = hidden.view(-1, c.block, c.base.hidden)
        previous = batch.token_ids.view(-1, c.block)[:, 0]
        block = DraftedBlock.gather()
        for j in range(c.block if depth is None else depth):
            scores, said = logits[:, j], hidden[:, j]
            if c.rank:
                tie = ops.markov_table.run(previous, parts["markov_table"])
                scores = scores + ops.markov_out.run(tie, parts["markov_out"])
                said = torch.cat((said, tie), dim=-1) if c.tied_confidence else said
            confidence = ops.confidence.run(said, parts["confidence"])[:, 0] if c.confidence else None
            previous = block.add(choose(scores, j), confidence).clamp(min=0)
        return block.done()

    def inputs(self, newest: torch.Tensor) -> torch.Tensor:
        """``[R]`` newest token of each request -> ``[R, block]`` ids for :meth:`draft`."""
        ids = newest.new_full((newest.shape[0], self.config.block), self.config.mask_token)
        ids[:, 0] = newest
        return ids
