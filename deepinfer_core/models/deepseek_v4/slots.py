"""Which operator's weight a tensor becomes part of."""

from __future__ import annotations

import re

from .config import LayerKind, V4Config

_ALWAYS = (
    (r"embed", "embedding"),
    (r"head", "head"),
    (r"attn\.(wq_a|wkv)", "qkv_a"),
    (r"attn\.wo_a", "o_a"),
    (r"attn\.wo_b", "o_b"),
    (r"attn\.indexer\.wq_b", "q_b_csa"),
    (r"attn\.indexer\.weights_proj", "index_weights"),
    (r"attn\.indexer\.compressor\.(wkv|wgate)", "pool_csa"),
    (r"ffn\.gate", "router"),
    (r"ffn\.experts\.\d+\.w[13]", "expert_gate_up"),
    (r"ffn\.experts\.\d+\.w2", "expert_down"),
    (r"ffn\.shared_experts\.w[13]", "shared_gate_up"),
    (r"ffn\.shared_experts\.w2", "shared_down"),
)
_OWNER = re.compile(r"(?:layers\.(\d+)\.)?(.+)\.(?:weight|scale)")


def slot_of(name: str, config: V4Config) -> str:
    """The slot of the main model that packs this tensor (released name), ``""`` for one that none does."""
    found = _OWNER.fullmatch(name)
    if found is None:
        return ""
    layer, owner = found.groups()
    for pattern, slot in _ALWAYS:
        if re.fullmatch(pattern, owner):
            return slot
    return _by_kind(owner, config.kinds[int(layer)]) if layer else ""


def _by_kind(owner: str, kind: LayerKind) -> str:
    if owner == "attn.wq_b":
        return "q_b_csa" if kind == "csa" else "q_b"
    return f"pool_{kind}" if owner in ("attn.compressor.wkv", "attn.compressor.wgate") else ""
