"""What may take the place of a dense decoder's operators (:mod:`.dense`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deepinfer_core.api import AttentionInputsRequest, BetweenAttentionRequest, GatedLinearRequest, Region

if TYPE_CHECKING:
    from .dense import DenseConfig


def dense_regions(c: DenseConfig, ops: Mapping[str, Any]) -> dict[str, Region]:
    """What can take the place of some of ``ops``, with fields as there."""
    merged, activation, rope = ops["gate_up"], ops["swiglu"], ops["rope"]
    common = {"device_type": merged.device_type, "dtype": merged.dtype}
    gated = GatedLinearRequest(
        in_features=merged.in_features,
        width=activation.width,
        weight_dtype=merged.weight_dtype,
        bias=merged.bias,
        demands=merged.demands,
        **common,
    )
    regions: dict[str, Region] = {}
    # The widest first: the gated layer is a part of it.
    products = ("qkv", "attention_out", "gate_up", "down")
    if len({ops[name].weight_dtype for name in products}) == 1:
        between = BetweenAttentionRequest(
            hidden=c.hidden,
            attended=c.heads * c.head_dim,
            width=c.intermediate,
            merged=(c.heads + 2 * c.kv_heads) * c.head_dim,
            eps=c.eps,
            weight_dtype=merged.weight_dtype,
            attention_bias=c.attention_bias,
            mlp_bias=c.mlp_bias,
            demands=merged.demands,
            **common,
        )
        regions["between_attention"] = Region(request=between, replaces=("norm", *products, "swiglu"))
    regions["gated_linear"] = Region(request=gated, replaces=("gate_up", "swiglu"))
    for kind in dict.fromkeys(c.kinds):
        write = ops[f"write_kv_{kind}"]
        inputs = AttentionInputsRequest(
            cache_group=write.cache_group,
            layer_kind=write.layer_kind,
            q_heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            theta=rope.theta,
            scaling=rope.scaling,
            max_positions=rope.max_positions,
            norm_eps=c.eps if c.qk_norm else None,
            cache_dtype=write.cache_dtype,
            block_size=write.block_size,
            demands=write.demands,
            **common,
        )
        parts = (*(("head_norm",) if c.qk_norm else ()), "rope", f"write_kv_{kind}")
        regions[f"attention_inputs_{kind}"] = Region(request=inputs, replaces=parts)
    return regions
