"""config.json of DeepSeek-V4, in the released spelling and in the one transformers saves.

Both say the same: ``compress_ratios`` or ``layer_types`` with ``compress_rates``; ``num_hash_layers`` or
``mlp_layer_types``; ``qk_rope_head_dim`` or ``partial_rotary_factor``; ``rope_scaling`` or ``rope_parameters``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from deepinfer_core.api import ConfigError, Scoring
from deepinfer_core.models.config_fields import MOST_LAYERS, one_of, real, sides, whole

LayerKind = Literal["window", "csa", "hca"]
DraftKind = Literal["mtp", "dspark"]

CSA_RATE = 4
_TYPES: Mapping[str, LayerKind] = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}


@attrs.frozen(kw_only=True)
class RopeConfig:
    """Angles of one layer kind."""

    theta: float
    scaling: Mapping[str, Any]


@attrs.frozen(kw_only=True)
class DSparkConfig:
    """The block drafter: rows drafted at once, filler token, layers whose output it reads, rank of its Markov head (0:
    it has neither Markov nor confidence head, as DFlash)."""

    block: int
    noise_token: int
    target_layers: tuple[int, ...]
    markov_rank: int


@attrs.frozen(kw_only=True)
class V4Config:
    """The fields that matter, checked. Lists run over the main model's layers."""

    layers: int
    hidden: int
    vocab: int
    heads: int
    head_dim: int
    rotary_dim: int
    q_rank: int
    o_groups: int
    o_rank: int
    window: int
    kinds: tuple[LayerKind, ...]
    csa_rate: int
    hca_rate: int
    rope_window: RopeConfig
    rope_compressed: RopeConfig
    max_positions: int
    index_heads: int
    index_dim: int
    index_top_k: int
    experts: int
    experts_per_token: int
    expert_width: int
    hashed: tuple[bool, ...]
    scoring: Scoring
    normalise: bool
    routed_scale: float
    swiglu_limit: float
    streams: int
    sinkhorn_iterations: int
    hyper_eps: float
    eps: float
    weight_block: tuple[int, int]
    quantised: bool
    drafts: int
    dspark: DSparkConfig | None

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> V4Config:
        """Raises ConfigError that names the field, its value and what was expected."""
        _check_fixed(config)
        layers = whole(config, "num_hidden_layers", most=MOST_LAYERS)
        heads, head_dim = whole(config, "num_attention_heads"), whole(config, "head_dim")
        kinds, hca_rate, drafts = _layers(config, layers)
        rotary_dim = _rotary_dim(config, head_dim)
        o_groups = whole(config, "o_groups")
        if heads % o_groups:
            raise ConfigError(f"config.json: o_groups={o_groups}: expected a divisor of num_attention_heads={heads}")
        experts, top_k = whole(config, "n_routed_experts"), whole(config, "num_experts_per_tok")
        if top_k > experts:
            raise ConfigError(f"config.json: num_experts_per_tok={top_k}: expected at most n_routed_experts={experts}")
        rope_window, rope_compressed = _ropes(config)
        quantisation = config.get("quantization_config")
        return cls(
            layers=layers,
            hidden=whole(config, "hidden_size"),
            vocab=whole(config, "vocab_size"),
            heads=heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            q_rank=whole(config, "q_lora_rank"),
            o_groups=o_groups,
            o_rank=whole(config, "o_lora_rank"),
            window=whole(config, "sliding_window"),
            kinds=kinds,
            csa_rate=CSA_RATE,
            hca_rate=hca_rate,
            rope_window=rope_window,
            rope_compressed=rope_compressed,
            max_positions=whole(config, "max_position_embeddings", 1048576),
            index_heads=whole(config, "index_n_heads"),
            index_dim=whole(config, "index_head_dim"),
            index_top_k=whole(config, "index_topk"),
            experts=experts,
            experts_per_token=top_k,
            expert_width=whole(config, "moe_intermediate_size"),
            hashed=_hashed(config, layers),
            scoring=one_of(config, "scoring_func", ("sqrtsoftplus", "sigmoid", "softmax"), "sqrtsoftplus"),
            normalise=bool(config.get("norm_topk_prob", True)),
            routed_scale=real(config, "routed_scaling_factor", 1.5),
            swiglu_limit=real(config, "swiglu_limit", 10.0),
            streams=whole(config, "hc_mult", 4),
            sinkhorn_iterations=whole(config, "hc_sinkhorn_iters", 20),
            hyper_eps=real(config, "hc_eps", 1e-6),
            eps=real(config, "rms_norm_eps", 1e-6),
            weight_block=_weight_block(quantisation),
            quantised=bool(quantisation),
            drafts=drafts,
            dspark=_dspark(config, layers) if drafts else None,
        )

    @property
    def rates(self) -> tuple[int, ...]:
        """Compression rates in use."""
        return tuple(r for kind, r in (("csa", self.csa_rate), ("hca", self.hca_rate)) if kind in self.kinds)

    @property
    def block_alignment(self) -> int:
        """block_size must be a multiple of this, so that no window of tokens straddles two blocks."""
        return math.lcm(1, *self.rates)

    def rope_of(self, kind: LayerKind) -> RopeConfig:
        return self.rope_window if kind == "window" else self.rope_compressed

    @property
    def draft_kind(self) -> DraftKind | None:
        if not self.drafts:
            return None
        return "dspark" if self.dspark else "mtp"


def _check_fixed(config: Mapping[str, Any]) -> None:
    one_of(config, "hidden_act", ("silu",), "silu")
    one_of(config, "num_key_value_heads", (1,), 1)
    one_of(config, "n_shared_experts", (1,), 1)
    one_of(config, "topk_method", ("noaux_tc",), "noaux_tc")
    for name in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        one_of(config, name, (False, None), False)


def _layers(config: Mapping[str, Any], layers: int) -> tuple[tuple[LayerKind, ...], int, int]:
    """Kinds of the main layers, the HCA rate, and how many draft stages follow."""
    ratios = config.get("compress_ratios")
    if ratios is None:
        return (*_from_types(config, layers), 0)
    if not _is_list_of_numbers(ratios) or len(ratios) < layers:
        raise ConfigError(f"config.json: compress_ratios={ratios!r}: expected at least {layers} integers >= 0")
    heavy = {ratio for ratio in ratios[:layers] if ratio not in (0, CSA_RATE)}
    if len(heavy) > 1:
        raise ConfigError(
            f"config.json: compress_ratios has {sorted(heavy)}: expected one rate beside 0 and {CSA_RATE}"
        )
    names: dict[int, LayerKind] = {0: "window", CSA_RATE: "csa"}
    if any(ratios[layers:]):
        raise ConfigError(f"config.json: compress_ratios={ratios!r}: expected 0 from entry {layers} on (draft stages)")
    kinds = tuple(names.get(ratio, "hca") for ratio in ratios[:layers])
    return kinds, heavy.pop() if heavy else 128, len(ratios) - layers


def _from_types(config: Mapping[str, Any], layers: int) -> tuple[tuple[LayerKind, ...], int]:
    types = config.get("layer_types")
    if not isinstance(types, list) or len(types) != layers or any(t not in _TYPES for t in types):
        raise ConfigError(f"config.json: layer_types={types!r}: expected {layers} of {', '.join(map(repr, _TYPES))}")
    rates = config.get("compress_rates") or {}
    csa = rates.get("compressed_sparse_attention", CSA_RATE)
    if csa != CSA_RATE:
        raise ConfigError(f"config.json: compress_rates.compressed_sparse_attention={csa!r}: expected {CSA_RATE}")
    hca = rates.get("heavily_compressed_attention", 128)
    if not isinstance(hca, int) or hca < 1:
        raise ConfigError(f"config.json: compress_rates.heavily_compressed_attention={hca!r}: expected an integer >= 1")
    return tuple(_TYPES[t] for t in types), hca


def _is_list_of_numbers(value: object) -> bool:
    return isinstance(value, Sequence) and all(type(item) is int and item >= 0 for item in value)


def _rotary_dim(config: Mapping[str, Any], head_dim: int) -> int:
    if config.get("qk_rope_head_dim") is not None:
        dim = whole(config, "qk_rope_head_dim")
    else:
        dim = int(head_dim * real(config, "partial_rotary_factor", 64 / 512))
    if dim % 2 or not 0 < dim <= head_dim:
        raise ConfigError(f"config.json: {dim} rotary channels: expected an even number up to head_dim={head_dim}")
    return dim


def _ropes(config: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    """Window-only layers: plain. Layers with compression: their own base and scaling, without YaRN's amplitude."""
    nested = config.get("rope_parameters") or {}
    main, compressed = nested.get("main", {}), nested.get("compress")
    if compressed is None:
        compressed = {**(config.get("rope_scaling") or {}), **{k: v for k, v in nested.items() if k != "main"}}
    scaling = dict(compressed)
    kind = scaling.pop("type", None) or scaling.get("rope_type") or "default"
    kind = scaling.get("rope_type") or kind
    theta = scaling.pop("rope_theta", None) or config.get("compress_rope_theta") or 160000.0
    scaling.pop("partial_rotary_factor", None)
    if kind not in ("default", "yarn"):
        raise ConfigError(f"config.json: rope_type={kind!r}: this model family supports 'default' and 'yarn'")
    window = RopeConfig(theta=float(main.get("rope_theta") or config.get("rope_theta") or 10000.0), scaling={})
    if kind == "default":
        return window, RopeConfig(theta=float(theta), scaling={})
    scaling.update(rope_type="yarn", attention_factor=1.0)
    return window, RopeConfig(theta=float(theta), scaling=scaling)


def _hashed(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    types = config.get("mlp_layer_types")
    if types is None:
        count = config.get("num_hash_layers", 3)
        if type(count) is not int or count < 0:
            raise ConfigError(f"config.json: num_hash_layers={count!r}: expected an integer >= 0")
        return tuple(layer < count for layer in range(layers))
    if not isinstance(types, list) or len(types) != layers or any(t not in ("hash_moe", "moe") for t in types):
        raise ConfigError(f"config.json: mlp_layer_types={types!r}: expected {layers} of 'hash_moe', 'moe'")
    return tuple(t == "hash_moe" for t in types)


def _weight_block(quantisation: object) -> tuple[int, int]:
    given = quantisation.get("weight_block_size", [128, 128]) if isinstance(quantisation, Mapping) else [128, 128]
    block = sides(given)
    if block is None:
        raise ConfigError(f"config.json: quantization_config.weight_block_size={given!r}: expected two integers > 0")
    return block


def _dspark(config: Mapping[str, Any], layers: int) -> DSparkConfig | None:
    if config.get("dspark_block_size") is None:
        return None
    targets = config.get("dspark_target_layer_ids")
    if not _is_list_of_numbers(targets) or not targets or max(targets) >= layers:
        raise ConfigError(f"config.json: dspark_target_layer_ids={targets!r}: expected layer numbers below {layers}")
    noise = config.get("dspark_noise_token_id")
    if type(noise) is not int or noise < 0:
        raise ConfigError(f"config.json: dspark_noise_token_id={noise!r}: expected a token id")
    rank = config.get("dspark_markov_rank")
    if type(rank) is not int or rank < 0:
        raise ConfigError(f"config.json: dspark_markov_rank={rank!r}: expected an integer >= 0")
    return DSparkConfig(
        block=whole(config, "dspark_block_size"),
        noise_token=noise,
        target_layers=tuple(targets),
        markov_rank=rank,
    )
