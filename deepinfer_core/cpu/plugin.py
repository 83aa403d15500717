"""Declares the host processor and its providers. Imports no torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from deepinfer_core.api import (
    AttentionInputsRequest,
    BatchedLinearRequest,
    DeviceInfo,
    GroupedLinearRequest,
    KVLayoutRequest,
    LazyRef,
    LinearRequest,
    PagedAttentionRequest,
    PluginInfo,
    ProbeEnv,
    Provider,
    RopeRequest,
    RouteRequest,
    SamplingRequest,
    Supports,
    WriteKVRequest,
    hookimpl,
    no,
    yes,
)

BACKEND = "cpu"
"""Its operators are offered to this backend only: another one's device may be of type cpu too."""
SCORE = 100
CAPS = frozenset({"deterministic", "spec_verify"})
STATE_CAPS = CAPS | {"device_state"}
KV_CAPS = CAPS | {"kv_layout:paged"}
PAGED_CAPS = KV_CAPS | {"block_attention"}
TRANSPOSED = "transposed_keys"
TRANSPOSED_CAPS = CAPS | {f"kv_layout:{TRANSPOSED}"}
BLOCK_SIZE = 64
"""Tokens of a block that the operators of ``transposed_keys`` go through at the speed of memory."""
SHORTEST_BLOCK = 32
"""Below this a sum of key channels is no faster than products of rows."""
# Operators that move data, or go by rows one after the other, give a row the same bits in any company.
INVARIANT = "batch_invariant"
ROW_PROOF = "tests/batch_invariance/test_core_providers.py::test_a_row_has_the_same_bits_in_any_company"


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name="cpu", api=(1, 1), help="The host processor")


@hookimpl
def deepinfer_probe(env: ProbeEnv) -> Sequence[DeviceInfo]:
    return [
        DeviceInfo(
            backend=BACKEND,
            type="cpu",
            arch=platform.machine(),
            count=1,
            memory=_total_memory(env.root),
            priority=0,
            evidence=f"{_model_name(env.root)}, {len(os.sched_getaffinity(0))} usable cores",
            provider=LazyRef("deepinfer_core.cpu.device:CpuDevice"),
            fallback="allow",
            legacy_names=(),
            block_size=BLOCK_SIZE,
        )
    ]


def _provider(name: str, op: str, target: str, caps: frozenset[str], supports: Callable[[Any], Supports]) -> Provider:
    return Provider(name=name, op=op, build=LazyRef(f"deepinfer_core.cpu.{target}"), caps=caps, supports=supports)


def _invariant(provider: Provider) -> Provider:
    """The provider, declared to be batch invariant."""
    return attrs.evolve(provider, caps=provider.caps | {INVARIANT}, proofs={INVARIANT: ROW_PROOF})


def _float32(request: Any, *fields: str) -> Supports:
    """Yes on the host when these fields all say float32."""
    if request.device_type != "cpu":
        return no(f"runs on cpu, not {request.device_type}")
    for field in fields:
        if getattr(request, field) != "float32":
            return no(f"computes in float32; {field} is {getattr(request, field)}")
    return yes(SCORE)


def _linear(request: LinearRequest | BatchedLinearRequest | GroupedLinearRequest) -> Supports:
    if request.weight_dtype.startswith(("fp8:", "fp4:")):
        return no(f"does not decode weights stored as {request.weight_dtype}")
    return _float32(request, "dtype", "out_dtype")


def _int8_weight_only(request: LinearRequest) -> Supports:
    verdict = _linear(request)
    if request.in_features % 32:
        return no(f"reads whole vectors: in_features must be a multiple of 32, not {request.in_features}")
    return yes(SCORE, "rounds weights to 8 bits and products to bfloat16") if verdict else verdict


def _write_kv(request: WriteKVRequest | AttentionInputsRequest) -> Supports:
    return _float32(request, "dtype", "cache_dtype")


def _paged(request: PagedAttentionRequest) -> Supports:
    if request.softcap is not None:
        return no("has no soft cap")
    if request.sinks:
        return no("has no sinks")
    return _float32(request, "dtype", "cache_dtype")


def _transposed_keys(request: KVLayoutRequest) -> Supports:
    entries = request.group.entries
    if [entry.name for entry in entries] != ["key", "value"] or entries[0].shape != entries[1].shape:
        return no(f"holds a key and a value of one shape, not {', '.join(entry.name for entry in entries)}")
    if len(entries[0].shape) != 2:
        return no(f"holds heads of channels, not shape {entries[0].shape}")
    if request.group.tokens_per_row != 1:
        return no("holds a row for every token")
    if request.block_size < SHORTEST_BLOCK or request.block_size % 16:
        return no(f"pays from blocks of {SHORTEST_BLOCK} tokens on, in steps of 16; block_size is {request.block_size}")
    if any(entry.dtype != "float32" for entry in entries):
        return no(f"holds float32, not {entries[0].dtype}")
    verdict = _float32(request)
    return yes(SCORE + 1) if verdict else verdict


def _sparse(request: Any) -> Supports:
    return _float32(request, "dtype", "cache_dtype")


def _rope_pairs(request: RopeRequest) -> Supports:
    return _float32(request, "dtype") if request.interleaved else no("rotates neighbouring channels only")


def _rope_halves(request: RopeRequest) -> Supports:
    return no("rotates halves only") if request.interleaved else _float32(request, "dtype")


def _pointwise(request: Any) -> Supports:
    return _float32(request, "dtype")


@hookimpl
def deepinfer_attention(device: DeviceInfo) -> Sequence[Provider]:
    if device.backend != BACKEND:
        return []
    return [
        _invariant(_provider("write_kv", "attention.write_kv", "attention:WriteKV", KV_CAPS, _write_kv)),
        _provider("paged_in_place", "attention.paged", "attention:PagedAttention", PAGED_CAPS, _paged),
        _invariant(
            _provider(
                "write_kv_transposed", "attention.write_kv", "transposed_keys:WriteKV", TRANSPOSED_CAPS, _write_kv
            )
        ),
        _provider(
            "paged_transposed",
            "attention.paged",
            "transposed_keys:PagedAttention",
            TRANSPOSED_CAPS | {"block_attention"},
            _paged,
        ),
        _provider("sparse", "attention.sparse", "sparse_attention:SparseAttention", KV_CAPS, _sparse),
        _provider("index_topk", "attention.index_topk", "index_topk:IndexTopK", KV_CAPS, _sparse),
        _provider("compress", "attention.compress", "compress:Compress", KV_CAPS, _sparse),
    ]


@hookimpl
def deepinfer_gemm(device: DeviceInfo) -> Sequence[Provider]:
    if device.backend != BACKEND:
        return []
    return [
        _provider("packed_linear", "gemm.linear", "linear:PackedLinear", CAPS, _linear),
        attrs.evolve(
            _provider("int8_weight_only", "gemm.linear", "int8_weight_only:Int8WeightOnly", CAPS, _int8_weight_only),
            on_request=True,
        ),
        _provider("batched", "gemm.batched", "grouped:BatchedLinear", CAPS, _linear),
        _provider("grouped", "gemm.grouped", "grouped:GroupedLinear", CAPS, _linear),
    ]


@hookimpl
def deepinfer_fused(device: DeviceInfo) -> Sequence[Provider]:
    if device.backend != BACKEND:
        return []
    target = "attention_inputs:AttentionInputs"
    caps = KV_CAPS | TRANSPOSED_CAPS
    return [_provider("attention_inputs", "fused.attention_inputs", target, caps, _write_kv)]


@hookimpl
def deepinfer_kv_layout(device: DeviceInfo) -> Sequence[Provider]:
    if device.backend != BACKEND:
        return []
    return [
        _provider("paged", "kv_layout.paged", "kv_layout:PagedLayout", CAPS, _float32),
        _provider(TRANSPOSED, "kv_layout.paged", "kv_layout:TransposedKeysLayout", CAPS, _transposed_keys),
    ]


def _route(request: RouteRequest) -> Supports:
    if request.device_type != "cpu":
        return no(f"runs on cpu, not {request.device_type}")
    return yes(SCORE) if request.scoring == "sqrtsoftplus" else no(f"scores by sqrtsoftplus, not {request.scoring}")


@hookimpl
def deepinfer_moe_communication(device: DeviceInfo) -> Sequence[Provider]:
    if device.backend != BACKEND:
        return []
    return [
        _provider("route", "moe.route", "moe:Route", CAPS, _route),
        _provider("local", "moe.exchange", "moe:LocalExchange", CAPS, _pointwise),
    ]


@hookimpl
def deepinfer_pointwise(device: DeviceInfo) -> Sequence[Provider]:
    if device.backend != BACKEND:
        return []
    return [
        _provider("rms_norm", "pointwise.rms_norm", "pointwise:RmsNorm", CAPS, _pointwise),
        _provider("swiglu", "pointwise.swiglu", "pointwise:Swiglu", CAPS, _pointwise),
        _provider("rope", "pointwise.rope", "pointwise:Rope", CAPS, _rope_halves),
        _provider("rope_pairs", "pointwise.rope", "rope_pairs:RopePairs", CAPS, _rope_pairs),
        _provider(
            "hyper_connection", "pointwise.hyper_connection", "hyper_connection:HyperConnection", CAPS, _pointwise
        ),
        _provider("hyper_head", "pointwise.hyper_head", "hyper_connection:HyperHead", CAPS, _pointwise),
    ]


def _stage(stage: str, target: str) -> Provider:
    def supports(request: SamplingRequest) -> Supports:
        return _float32(request) if request.stage == stage else no(f"serves stage {stage!r}, not {request.stage!r}")

    return _invariant(_provider(stage, SamplingRequest.op, target, STATE_CAPS, supports))


@hookimpl
def deepinfer_sampling(device: DeviceInfo) -> Sequence[Provider]:
    if device.backend != BACKEND:
        return []
    return [
        _stage("mask", "mask:Mask"),
        _stage("top_k", "top:TopK"),
        _stage("top_p", "top:TopP"),
        _stage("draw", "draw:Draw"),
        _stage("logprobs", "top:Logprobs"),
    ]


@hookimpl
def deepinfer_runner_ops(device: DeviceInfo) -> Sequence[Provider]:
    if device.backend != BACKEND:
        return []
    return [
        _invariant(_provider("input_ids", "runner.input_ids", "runner_ops:InputIds", STATE_CAPS, _float32)),
        _invariant(_provider("slot_mapping", "runner.slot_mapping", "runner_ops:SlotMapping", STATE_CAPS, _float32)),
        _invariant(_provider("append_tokens", "runner.append_tokens", "runner_ops:AppendTokens", STATE_CAPS, _float32)),
    ]


def _total_memory(root: str) -> int:
    for line in _lines(root, "proc/meminfo"):
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 0


def _model_name(root: str) -> str:
    for line in _lines(root, "proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _lines(root: str, name: str) -> list[str]:
    try:
        return (Path(root) / name).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
