"""What the reference backend offers: one fallback provider for every operator, on every device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepinfer_core.api import (
    STAGES,
    AttentionInputsRequest,
    BetweenAttentionRequest,
    DeviceInfo,
    GatedLinearRequest,
    LazyRef,
    OpRequest,
    PluginInfo,
    Provider,
    RopeRequest,
    SampleTokensRequest,
    SamplingRequest,
    Supports,
    hookimpl,
    no,
    yes,
)

LAYOUT = "paged"
ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# Every operator treats rows one by one and knows each row's position, so several rows of one request are no
# special case; none picks an algorithm at random.
COMMON_CAPS = frozenset({"deterministic", "spec_verify"})
STATE_CAPS = COMMON_CAPS | {"device_state"}

INVARIANT = "batch_invariant"
ROW_PROOF = "tests/batch_invariance/test_core_providers.py::test_a_row_has_the_same_bits_in_any_company"
MOVES_DATA = frozenset(
    {"write_kv", "embedding", "input_ids", "slot_mapping", "append_tokens", "mask", "bias", "penalties", "temperature"}
    | {"all_to_all"}
)
"""These move data, count, or take the same few correctly rounded operations on every element, so that a row's bits do
not depend on the others. Where a sum or a logarithm is taken, a library may choose its way by the size of the batch."""

PROOFS = {"all_to_all": "tests/conformance/test_moe_communication.py::test_the_reference_passes"}
"""Where it is not :data:`ROW_PROOF`."""

_STAGE_TARGETS = {
    "mask": "mask:Mask",
    "bias": "stages:Bias",
    "penalties": "stages:Penalties",
    "temperature": "stages:Temperature",
    "min_p": "stages:MinP",
    "top_k": "stages:TopK",
    "top_p": "stages:TopP",
    "draw": "draw:Draw",
    "logprobs": "logprobs:Logprobs",
    "verify": "verify:Verify",
}


def _always(_: OpRequest) -> Supports:
    return yes(0)


def _provider(name: str, op: str, target: str, caps: frozenset[str], supports: Any = _always) -> Provider:
    build = LazyRef(f"deepinfer_core.reference.{target}")
    proofs = {INVARIANT: PROOFS.get(name, ROW_PROOF)} if name in MOVES_DATA else {}
    caps |= proofs.keys()
    return Provider(name=name, op=op, build=build, caps=caps, supports=supports, fallback=True, proofs=proofs)


def _supports_rope(request: RopeRequest | AttentionInputsRequest) -> Supports:
    kind = request.scaling.get("rope_type", request.scaling.get("type", "default"))
    if kind not in ROPE_TYPES:
        return no(f"rope_type {kind!r} is not defined; known: {', '.join(ROPE_TYPES)}")
    return yes(0)


def _stage(name: str) -> Provider:
    def supports(request: SamplingRequest) -> Supports:
        return yes(0) if request.stage == name else no(f"serves stage {name!r}, not {request.stage!r}")

    return _provider(name, SamplingRequest.op, _STAGE_TARGETS[name], STATE_CAPS, supports)


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name="reference", api=(1, 1), help="every operator in plain torch, on any torch device")


@hookimpl
def deepinfer_attention(device: DeviceInfo) -> Sequence[Provider]:
    caps = COMMON_CAPS | {f"kv_layout:{LAYOUT}"}
    return [
        _provider("write_kv", "attention.write_kv", "attention:WriteKV", caps),
        _provider("paged_attention", "attention.paged", "attention:Paged", caps | {"block_attention"}),
        _provider("sparse_attention", "attention.sparse", "sparse_attention:SparseAttention", caps),
        _provider("index_topk", "attention.index_topk", "index_topk:IndexTopK", caps),
        _provider("compress", "attention.compress", "compress:Compress", caps),
    ]


@hookimpl
def deepinfer_gemm(device: DeviceInfo) -> Sequence[Provider]:
    return [
        _provider("linear", "gemm.linear", "gemm:Linear", COMMON_CAPS | {"rounded_activations"}),
        _provider("batched_linear", "gemm.batched", "grouped:BatchedLinear", COMMON_CAPS),
        _provider("grouped_linear", "gemm.grouped", "grouped:GroupedLinear", COMMON_CAPS | {"packed_weights"}),
    ]


@hookimpl
def deepinfer_fused(device: DeviceInfo) -> Sequence[Provider]:
    caps = COMMON_CAPS | {f"kv_layout:{LAYOUT}"}
    return [
        _provider("attention_inputs", AttentionInputsRequest.op, "fused:AttentionInputs", caps, _supports_rope),
        _provider("gated_linear", GatedLinearRequest.op, "fused:GatedLinear", COMMON_CAPS),
        _provider("between_attention", BetweenAttentionRequest.op, "fused:BetweenAttention", COMMON_CAPS),
        _provider("sample_tokens", SampleTokensRequest.op, "fused:SampleTokens", STATE_CAPS),
    ]


@hookimpl
def deepinfer_moe_communication(device: DeviceInfo) -> Sequence[Provider]:
    return [
        _provider("route", "moe.route", "moe:Route", COMMON_CAPS),
        _provider("local", "moe.exchange", "moe:LocalExchange", COMMON_CAPS),
        _provider("all_to_all", "moe.expert_parallel", "expert_parallel:AllToAll", COMMON_CAPS),
    ]


@hookimpl
def deepinfer_pointwise(device: DeviceInfo) -> Sequence[Provider]:
    return [
        _provider("rms_norm", "pointwise.rms_norm", "pointwise:RmsNorm", COMMON_CAPS),
        _provider("rope", "pointwise.rope", "rope:Rope", COMMON_CAPS, _supports_rope),
        _provider("swiglu", "pointwise.swiglu", "pointwise:Swiglu", COMMON_CAPS),
        _provider("embedding", "pointwise.embedding", "pointwise:Embedding", COMMON_CAPS),
        _provider("hyper_connection", "pointwise.hyper_connection", "hyper_connection:HyperConnection", COMMON_CAPS),
        _provider("hyper_head", "pointwise.hyper_head", "hyper_connection:HyperHead", COMMON_CAPS),
        _provider("quantise_dequantise", "pointwise.quantise_dequantise", "quantise:QuantiseDequantise", COMMON_CAPS),
    ]


@hookimpl
def deepinfer_sampling(device: DeviceInfo) -> Sequence[Provider]:
    return [_stage(name) for name in (*STAGES, "logprobs", "verify")]


@hookimpl
def deepinfer_runner_ops(device: DeviceInfo) -> Sequence[Provider]:
    return [
        _provider("input_ids", "runner.input_ids", "runner_ops:InputIds", STATE_CAPS),
        _provider("slot_mapping", "runner.slot_mapping", "runner_ops:SlotMapping", STATE_CAPS),
        _provider("append_tokens", "runner.append_tokens", "runner_ops:AppendTokens", STATE_CAPS),
    ]


@hookimpl
def deepinfer_kv_layout(device: DeviceInfo) -> Sequence[Provider]:
    # The name is the layout's: attention providers answer to it with the cap kv_layout:paged.
    return [_provider(LAYOUT, "kv_layout.paged", "kv_layout:PagedLayout", COMMON_CAPS)]
