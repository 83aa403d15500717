"""Which operator runs on what, checked how: the table of the README, printed by ``python -m`` this module."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from deepinfer_core.api import DeviceInfo, LazyRef, Provider

from . import plugin
from .probe import BACKEND

HEADER = (
    "| operator | on the NPU by | its document names the 950 | checked | where it is refused |\n|---|---|---|---|---|"
)
CHECKED = "schema, Meta, emulation"
KERNEL = "Triton interpreter, compiled to Ascend 950 IR"


@attrs.frozen(kw_only=True)
class Native:
    """What stands behind a provider. operator: of torch_npu, or of torch. named: the document lists the 950."""

    operator: str
    named: bool | None
    checked: str = CHECKED
    refused: str


NATIVE = {
    "attention.write_kv:write_kv": Native(
        operator="npu_scatter_pa_kv_cache", named=False, refused="cache of another dtype than the keys"
    ),
    "attention.paged:fused_infer": Native(
        operator="npu_fused_infer_attention_score_v2",
        named=False,
        refused="windows, sinks, soft cap, head_dim other than 128, block_size no multiple of 128, float32",
    ),
    "gemm.linear:linear": Native(
        operator="torch linear", named=None, checked="emulation", refused="FP8 and FP4 weights, other out_dtype"
    ),
    "gemm.batched:batched": Native(
        operator="torch bmm", named=None, checked="emulation", refused="FP8 and FP4 weights, other out_dtype"
    ),
    "gemm.grouped:grouped": Native(
        operator="npu_grouped_matmul", named=False, refused="FP8 and FP4 weights, one group, 65,536 channels"
    ),
    "moe.exchange:local": Native(operator="npu_moe_init_routing_v2", named=False, refused="over 10,240 experts"),
    "pointwise.rms_norm:rms_norm": Native(operator="npu_rms_norm", named=False, refused="float64"),
    "pointwise.rope:rope": Native(operator="npu_rotary_mul", named=False, refused="yarn scaling, 896 channels"),
    "pointwise.swiglu:swiglu": Native(operator="npu_swiglu, npu_clipped_swiglu", named=False, refused="float64"),
    "attention.index_topk:triton_index": Native(
        operator="own Triton kernel (scores), torch sort; only when asked for",
        named=None,
        checked=KERNEL,
        refused="heads, head_dim or entries a block that are no power of two from 16; no triton-ascend",
    ),
    "attention.compress:triton_compress": Native(
        operator="own Triton kernel (pooling), only when asked for; then npu_rms_norm and npu_rotary_mul",
        named=None,
        checked=KERNEL,
        refused="head_dim no multiple of 64, float64; no triton-ascend",
    ),
    "pointwise.hyper_connection:triton_mix": Native(
        operator="own Triton kernels (mix), npu_mhc_post (merge); only when asked for",
        named=None,
        checked=KERNEL,
        refused="float32 streams, hidden no multiple of 64; no triton-ascend",
    ),
    "pointwise.hyper_connection:mhc_post": Native(
        operator="npu_mhc_post (merge; mix by the reference)", named=True, refused="float32 streams"
    ),
}
"""``op:provider`` -> what it calls. A test holds that every provider is here."""

REFERENCE = {
    "attention.sparse": (
        "npu_sparse_flash_attention reads one paged pool; window rows and entries lie in two, each with its own choice"
    ),
    "moe.expert_parallel": (
        "torch's collectives, which torch_npu has over HCCL; npu_moe_distribute_dispatch_v2 is not used, since only "
        "several devices could try it"
    ),
    "moe.route": (
        "npu_moe_gating_top_k scores by softmax or sigmoid alone, and does not say whether it normalises, nor which "
        "expert wins a tie"
    ),
    "pointwise.quantise_dequantise": (
        "npu_dynamic_mx_quant rounds scales down (scale_alg 0), or names an algorithm without its formula (1)"
    ),
    "pointwise.hyper_head": "torch_npu has no such operator",
    "pointwise.embedding": "a gather, which torch does",
    "kv_layout.paged": "the reference's layout is the one the operators want",
    "sampling.stage": (
        "npu_top_k_top_p keeps all that tie at the border, or the higher id, where the contract keeps the lower; the "
        "others have no operator"
    ),
    "runner.*": "gathers, which torch does",
}
"""Operators that stay with the reference, and why."""

EVERYTHING = DeviceInfo(
    backend=BACKEND,
    type="npu",
    arch="Ascend950",
    count=1,
    memory=0,
    priority=0,
    evidence="",
    provider=LazyRef("deepinfer_ascend950.device:AscendDevice"),
)


def providers() -> Sequence[Provider]:
    """All that the plugin declares for its own device."""
    hooks = (
        plugin.deepinfer_attention,
        plugin.deepinfer_gemm,
        plugin.deepinfer_moe_communication,
        plugin.deepinfer_pointwise,
    )
    return [provider for hook in hooks for provider in hook(EVERYTHING)]


def table() -> str:
    """Markdown, one row an operator."""
    rows = []
    for provider in providers():
        native = NATIVE[f"{provider.op}:{provider.name}"]
        named = "-" if native.named is None else "yes" if native.named else "no"
        rows.append(
            f"| `{provider.op}` | {native.operator} | {named} | {native.checked}; silicon: not run on hardware "
            f"| {native.refused} |"
        )
    rows += [f"| `{op}` | reference | - | the core's tests | {why} |" for op, why in REFERENCE.items()]
    return "\n".join([HEADER, *rows])


if __name__ == "__main__":
    print(table())
