"""What this backend declares. Imports no torch and opens no device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from deepinfer_core.api import (
    AppendTokensRequest,
    AttentionInputsRequest,
    BetweenAttentionRequest,
    CommandInfo,
    DeviceInfo,
    EmbeddingRequest,
    GatedLinearRequest,
    InputIdsRequest,
    KVLayoutRequest,
    LazyRef,
    LinearRequest,
    NoDevice,
    PagedAttentionRequest,
    PluginInfo,
    ProbeEnv,
    Provider,
    RmsNormRequest,
    RopeRequest,
    SampleTokensRequest,
    SamplingRequest,
    SlotMappingRequest,
    Supports,
    SwigluRequest,
    WriteKVRequest,
    hookimpl,
    no,
    yes,
)

from .deep_gemm_probe import missing as deep_gemm_missing
from .probe import BACKEND, LEGACY_NAMES, find
from .settings import Settings

SCORE = 300
"""Of this package's own kernels; a plugin with a faster one says more."""
CAPS = frozenset({"deterministic", "spec_verify", "graph_capture"})
ROW_CAPS = CAPS | {"batch_invariant"}
"""Of operators that treat every row alone, by the same instructions whatever stands beside it."""
STATE_CAPS = ROW_CAPS | {"device_state"}
FP8_CAPS = ROW_CAPS | {"packed_weights"}
KV_CAPS = frozenset({"kv_layout:paged"})
PROOFS = "tests/nvidia_sm100"
"""Where the cap ``batch_invariant`` is proved; ``test_nvidia_batch_invariance.py`` has a test for most operators."""
FP8_PROOF = "test_nvidia_fp8_linear.py::test_a_row_has_the_same_bits_among_any_number_of_rows"
DTYPES = ("bfloat16", "float16", "float32")
WIDEST = 262144
"""Logits of a row that is sampled by one region."""
CACHE_DTYPES = (*DTYPES, "float8_e4m3fn")


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(
        name="nvidia_sm100", api=(1, 1), help="NVIDIA GPUs of compute capability 9.0 and 10.x", settings=Settings
    )


@hookimpl
def deepinfer_probe(env: ProbeEnv) -> Sequence[DeviceInfo | NoDevice]:
    found = find(env)
    if found.devices:
        return found.devices
    return [NoDevice(backend=BACKEND, reason=found.reason, fix="check: nvidia-smi", legacy_names=LEGACY_NAMES)]


@hookimpl
def deepinfer_commands() -> Sequence[CommandInfo]:
    return [
        CommandInfo(
            name="tune",
            help="Measure which kernels multiply fastest, for a model's matrices on this GPU",
            command=LazyRef("deepinfer_nvidia_sm100.command:tune"),
        ),
        CommandInfo(
            name="warmup",
            help="Compile every kernel that a model needs on this GPU",
            command=LazyRef("deepinfer_nvidia_sm100.warmup:warmup"),
        ),
    ]


def _provider(
    name: str,
    op: str,
    target: str,
    caps: frozenset[str],
    supports: Callable[[Any], Supports] | None = None,
    *,
    proof: str | None = None,
) -> Provider:
    """A provider, with this test, ``[file::]name``, as the proof of ``batch_invariant`` where it claims that."""
    proof = proof or f"test_{name}"
    test = proof if "::" in proof else f"test_nvidia_batch_invariance.py::{proof}"
    return Provider(
        name=name,
        op=op,
        build=LazyRef(f"deepinfer_nvidia_sm100.ops.{target}"),
        caps=caps,
        supports=supports or _floats,
        proofs={"batch_invariant": f"{PROOFS}/{test}"} if "batch_invariant" in caps else {},
    )


def _floats(request: Any) -> Supports:
    """Yes on a GPU when dtype, and cache_dtype where there is one, are floats that Triton computes with."""
    if request.device_type != "cuda":
        return no(f"runs on cuda, not {request.device_type}")
    for field, known in (("dtype", DTYPES), ("cache_dtype", CACHE_DTYPES)):
        value = getattr(request, field, "float32")
        if value not in known:
            return no(f"{field} {value}: expected one of {', '.join(known)}")
    return yes(SCORE)


def _norm(request: RmsNormRequest) -> Supports:
    if request.hidden > 65536:
        return no(f"hidden {request.hidden}: keeps a whole row in registers, up to 65536")
    return _floats(request)


def _rope(request: RopeRequest) -> Supports:
    if request.interleaved or request.trailing:
        return no("rotates halves of the first channels only")
    return _floats(request)


def _heads(request: Any) -> Supports:
    if request.head_dim not in (16, 32, 64, 128, 256):
        return no(f"head_dim {request.head_dim}: expected 16, 32, 64, 128 or 256")
    if request.cache_dtype not in (request.dtype, "float8_e4m3fn"):
        return no(f"cache_dtype {request.cache_dtype} is neither dtype {request.dtype} nor float8_e4m3fn")
    return _floats(request)


def _linear(request: LinearRequest) -> Supports:
    if request.weight_dtype.startswith(("fp8:", "fp4:")):
        return no(f"multiplies plain weights, not {request.weight_dtype}")
    return _products(request)


def _fp8_linear(request: LinearRequest) -> Supports:
    if request.activations:
        return no("multiplies rows as they are")
    return _fp8_weights(request)


def _rounded_fp8_linear(request: LinearRequest) -> Supports:
    if request.activations != "fp8:e4m3:128":
        return no(f"rounds rows as 'fp8:e4m3:128' says, not {request.activations!r}")
    return _fp8_weights(request)


def _fp8_weights(request: LinearRequest) -> Supports:
    if not request.weight_dtype.startswith("fp8:e4m3:") or not request.weight_dtype.endswith("x128"):
        return no(f"weight_dtype {request.weight_dtype}: expected fp8:e4m3 in blocks of 128 columns")
    if request.in_features % 128:
        return no(f"in_features {request.in_features}: expected a multiple of 128")
    return _products(request)


def _deep_gemm_linear(request: LinearRequest) -> Supports:
    verdict = _rounded_fp8_linear(request)
    if not verdict:
        return verdict
    if request.out_dtype != "bfloat16" or request.weight_dtype != "fp8:e4m3:128x128":
        return no("DeepGEMM multiplies blocks of 128 x 128 and writes bfloat16")
    reason = deep_gemm_missing()
    return no(reason) if reason else yes(SCORE + 10, "DeepGEMM, from the rows on where it is faster")


def _products(request: LinearRequest) -> Supports:
    if request.out_dtype not in (request.dtype, "float32"):
        return no(f"out_dtype {request.out_dtype}: expected {request.dtype} or float32")
    return _floats(request)


def _fixed_order(verdict: Supports) -> Supports:
    return yes(SCORE - 100, "the same order of sums for every number of rows") if verdict else verdict


def _invariant_linear(request: LinearRequest) -> Supports:
    return _fixed_order(_linear(request))


@hookimpl
def deepinfer_attention(device: DeviceInfo) -> Sequence[Provider]:
    if device.backend != BACKEND:
        return []
    return [
        _provider("write_kv", WriteKVRequest.op, "write_kv:WriteKV", ROW_CAPS | KV_CAPS),
        _provider("paged_attention", PagedAttentionRequest.op, "paged_attention:Paged", ROW_CAPS | KV_CAPS, _heads),
    ]


@hookimpl
def deepinfer_gemm(device: DeviceInfo) -> Sequence[Provider]:
    if device.backend != BACKEND:
        return []
    return [
        _provider("linear", LinearRequest.op, "linear:Linear", CAPS, _linear),
        _provider(
            "fixed_order_linear",
            LinearRequest.op,
            "fixed_linear:FixedOrderLinear",
            ROW_CAPS,
            _invariant_linear,
            proof="test_linear",
        ),
        _provider("fp8_linear", LinearRequest.op, "fp8_linear:Fp8Linear", FP8_CAPS, _fp8_linear, proof=FP8_PROOF),
        _provider(
            "rounded_fp8_linear",
            LinearRequest.op,
            "fp8_linear:RoundedFp8Linear",
            FP8_CAPS | {"rounded_activations"},
            _rounded_fp8_linear,
            proof=FP8_PROOF,
        ),
        _provider(
            "deep_gemm_linear",
            LinearRequest.op,
            "deep_gemm_linear:DeepGemmLinear",
            CAPS | {"packed_weights", "rounded_activations"},
            _deep_gemm_linear,
        ),
    ]


def _gated(request: GatedLinearRequest) -> Supports:
    if request.weight_dtype.startswith(("fp8:", "fp4:")):
        return no(f"multiplies plain weights, not {request.weight_dtype}")
    if request.dtype == "float32":
        return no("no gain in float32")
    return _floats(request)


def _between(request: BetweenAttentionRequest) -> Supports:
    if request.weight_dtype.startswith(("fp8:", "fp4:")):
        return no(f"multiplies plain weights, not {request.weight_dtype}")
    if request.dtype != "bfloat16":
        return no(f"dtype {request.dtype}: rows times a norm's weight, not yet scaled, are sure to fit bfloat16 only")
    return _norm(request.norm) and _floats(request)


def _invariant_gated(request: GatedLinearRequest) -> Supports:
    return _fixed_order(_gated(request))


def _sample_tokens(request: SampleTokensRequest) -> Supports:
    if request.vocab_size > WIDEST:
        return no(f"vocab_size {request.vocab_size}: keeps what its groups hold in registers, up to {WIDEST}")
    return _floats(request)


@hookimpl
def deepinfer_fused(device: DeviceInfo) -> Sequence[Provider]:
    if device.backend != BACKEND:
        return []
    return [
        _provider(
            "attention_inputs",
            AttentionInputsRequest.op,
            "attention_inputs:AttentionInputs",
            ROW_CAPS | KV_CAPS,
            _heads,
        ),
        _provider("gated_linear", GatedLinearRequest.op, "gated_linear:GatedLinear", CAPS, _gated),
        _provider(
            "between_attention", BetweenAttentionRequest.op, "between_attention:BetweenAttention", CAPS, _between
        ),
        _provider(
            "fixed_order_gated_linear",
            GatedLinearRequest.op,
            "fixed_gated:FixedOrderGatedLinear",
            ROW_CAPS,
            _invariant_gated,
            proof="test_gated_linear",
        ),
        _provider(
            "sample_tokens",
            SampleTokensRequest.op,
            "sample_tokens:SampleTokens",
            CAPS | {"device_state"},
            _sample_tokens,
        ),
    ]


@hookimpl
def deepinfer_pointwise(device: DeviceInfo) -> Sequence[Provider]:
    if device.backend != BACKEND:
        return []
    return [
        _provider("rms_norm", RmsNormRequest.op, "rms_norm:RmsNorm", ROW_CAPS, _norm),
        _provider("rope", RopeRequest.op, "rope:Rope", ROW_CAPS, _rope),
        _provider("swiglu", SwigluRequest.op, "swiglu:Swiglu", ROW_CAPS),
        _provider("embedding", EmbeddingRequest.op, "embedding:Embedding", ROW_CAPS),
    ]


@hookimpl
def deepinfer_kv_layout(device: DeviceInfo) -> Sequence[Provider]:
    if device.backend != BACKEND:
        return []
    # The same memory as the reference's layout of this name, so that its operators can read it too.
    return [_provider("paged", KVLayoutRequest.op, "kv_layout:paged_layout", ROW_CAPS, proof="test_write_kv")]


def _stage(stage: str, target: str) -> Provider:
    def supports(request: SamplingRequest) -> Supports:
        return _floats(request) if request.stage == stage else no(f"serves stage {stage!r}, not {request.stage!r}")

    proof = "test_logprobs" if stage == "logprobs" else "test_sampling"
    return _provider(stage, SamplingRequest.op, target, STATE_CAPS, supports, proof=proof)


@hookimpl
def deepinfer_sampling(device: DeviceInfo) -> Sequence[Provider]:
    if device.backend != BACKEND:
        return []
    return [
        _stage("mask", "mask:Mask"),
        _stage("bias", "bias:Bias"),
        _stage("penalties", "penalties:Penalties"),
        _stage("temperature", "temperature:Temperature"),
        _stage("min_p", "temperature:MinP"),
        _stage("top_k", "top_k:TopK"),
        _stage("top_p", "top_p:TopP"),
        _stage("draw", "draw:Draw"),
        _stage("logprobs", "logprobs:Logprobs"),
    ]


@hookimpl
def deepinfer_runner_ops(device: DeviceInfo) -> Sequence[Provider]:
    if device.backend != BACKEND:
        return []
    return [
        _provider("input_ids", InputIdsRequest.op, "runner_ops:InputIds", STATE_CAPS, proof="test_runner"),
        _provider("slot_mapping", SlotMappingRequest.op, "runner_ops:SlotMapping", STATE_CAPS, proof="test_runner"),
        _provider("append_tokens", AppendTokensRequest.op, "runner_ops:AppendTokens", STATE_CAPS, proof="test_runner"),
    ]
