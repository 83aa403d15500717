"""The model's sizes: read from config.json, and those of the demo model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["window", "csa", "hca"]

CONFIG: Mapping[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 128,
    "sliding_window": 64,
    "compress_ratios": [0, 4, 32, 4, 32, 4],
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 4096,
    "index_n_heads": 8,
    "index_head_dim": 64,
    "index_topk": 64,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 96,
    "num_hash_layers": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
"""config.json of the demo model, in the released spelling."""


@dataclass(frozen=True)
class Shape:
    """What the forward pass needs of config.json."""

    vocab: int
    hidden: int
    kinds: tuple[Kind, ...]
    hashed: int
    heads: int
    head_dim: int
    rotary: int
    q_rank: int
    o_groups: int
    o_rank: int
    window: int
    csa_rate: int
    hca_rate: int
    theta: float
    compressed_theta: float
    yarn: tuple[float, float, float, float] | None
    index_heads: int
    index_dim: int
    index_top_k: int
    experts: int
    top_k: int
    width: int
    routed_scale: float
    limit: float
    streams: int
    sinkhorn: int
    hyper_eps: float
    eps: float

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Shape:
        """From config.json in the released spelling. ``yarn``: factor, original length, beta_fast, beta_slow."""
        ratios = config["compress_ratios"][: config["num_hidden_layers"]]
        scaling = config.get("rope_scaling")
        return cls(
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            kinds=tuple("window" if r == 0 else "csa" if r == 4 else "hca" for r in ratios),
            hashed=config["num_hash_layers"],
            heads=config["num_attention_heads"],
            head_dim=config["head_dim"],
            rotary=config["qk_rope_head_dim"],
            q_rank=config["q_lora_rank"],
            o_groups=config["o_groups"],
            o_rank=config["o_lora_rank"],
            window=config["sliding_window"],
            csa_rate=4,
            hca_rate=max([r for r in ratios if r > 4], default=128),
            theta=config["rope_theta"],
            compressed_theta=config["compress_rope_theta"],
            yarn=(
                scaling["factor"],
                scaling["original_max_position_embeddings"],
                scaling["beta_fast"],
                scaling["beta_slow"],
            )
            if scaling
            else None,
            index_heads=config["index_n_heads"],
            index_dim=config["index_head_dim"],
            index_top_k=config["index_topk"],
            experts=config["n_routed_experts"],
            top_k=config["num_experts_per_tok"],
            width=config["moe_intermediate_size"],
            routed_scale=config["routed_scaling_factor"],
            limit=config["swiglu_limit"],
            streams=config["hc_mult"],
            sinkhorn=config["hc_sinkhorn_iters"],
            hyper_eps=config["hc_eps"],
            eps=config["rms_norm_eps"],
        )
