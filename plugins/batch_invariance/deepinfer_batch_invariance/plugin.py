"""What the plugin offers. Nothing is offered unless batch invariance is demanded: installing it changes no bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from deepinfer_core.api import (
    CommandInfo,
    DeviceInfo,
    LazyRef,
    OpRequest,
    PagedAttentionRequest,
    PluginInfo,
    Provider,
    SamplingRequest,
    Supports,
    hookimpl,
    no,
    yes,
)

CAP = "batch_invariant"
CAPS = frozenset({CAP, "deterministic", "spec_verify"})
KV_CAPS = CAPS | {"kv_layout:paged"}
GRAPH_CAPS = CAPS | {"graph_capture"}

HOST_SCORE = 60
"""Of operators made for the host's processor. A backend's own, which say 100 and more, come first."""
ANY_SCORE = 20
"""Of those that run the reference operators on any device, in a form that keeps a row's bits."""

TRITON_SCORE = 40
"""Of kernels for any device that Triton compiles for."""
WIDEST_ROW = 65536
"""Channels that a kernel keeps in registers."""
KERNEL_DTYPES = ("float32", "bfloat16", "float16")

PROOFS = "tests/batch_invariance"

Verdict = Callable[[Any], Supports]


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name="batch_invariance", api=(1, 1), help="The same bits for a request in any company")


def _provider(
    name: str, op: str, target: str, supports: Verdict, *, proof: str, caps: frozenset[str] = CAPS
) -> Provider:
    def where_demanded(request: OpRequest) -> Supports:
        if CAP not in request.demands:
            return no(f"serves requests that demand {CAP}")
        return supports(request)

    return Provider(
        name=name,
        op=op,
        build=LazyRef(f"deepinfer_batch_invariance.{target}"),
        caps=caps,
        supports=where_demanded,
        proofs={CAP: f"{PROOFS}/{proof}"},
    )


def _host(*fields: str) -> Verdict:
    """Yes on the host when these fields all say float32."""

    def supports(request: Any) -> Supports:
        if request.device_type != "cpu":
            return no(f"runs on cpu, not {request.device_type}")
        for field in fields:
            if getattr(request, field) != "float32":
                return no(f"computes in float32; {field} is {getattr(request, field)}")
        return yes(HOST_SCORE)

    return supports


def _host_linear(request: Any) -> Supports:
    if request.weight_dtype.startswith(("fp8:", "fp4:")):
        return no(f"does not decode weights stored as {request.weight_dtype}")
    return _host("dtype", "out_dtype")(request)


def _host_paged(request: PagedAttentionRequest) -> Supports:
    if request.softcap is not None:
        return no("has no soft cap")
    if request.sinks:
        return no("has no sinks")
    return _host("dtype", "cache_dtype")(request)


def _host_transposed(request: PagedAttentionRequest) -> Supports:
    size = request.block_size
    if size % 16:
        return no(f"goes through blocks of a multiple of 16 tokens; block_size is {size}")
    if request.head_dim > 128:
        return no(f"head_dim {request.head_dim}: products of more than 128 channels are not one sum in order")
    verdict = _host_paged(request)
    return yes(HOST_SCORE + 1) if verdict else verdict


def _any(_: Any) -> Supports:
    return yes(ANY_SCORE)


def _triton(request: Any) -> Supports:
    """Yes on devices other than the host, where Triton is installed, for the floats its kernels take."""
    if request.device_type == "cpu":
        return no("kernels for devices other than the host")
    if find_spec("triton") is None:
        return no("triton is not installed: pip install 'deepinfer-batch-invariance[triton]'")
    for field in ("dtype", "out_dtype"):
        value = getattr(request, field, "float32")
        if value not in KERNEL_DTYPES:
            return no(f"{field} {value}: expected one of {', '.join(KERNEL_DTYPES)}")
    if getattr(request, "hidden", 0) > WIDEST_ROW and request.op == "pointwise.rms_norm":
        return no(f"hidden {request.hidden}: keeps a whole row, up to {WIDEST_ROW}")
    return yes(TRITON_SCORE)


def _triton_linear(request: Any) -> Supports:
    if request.weight_dtype.startswith(("fp8:", "fp4:")):
        return no(f"does not decode weights stored as {request.weight_dtype}")
    return _triton(request)


@hookimpl
def deepinfer_gemm(device: DeviceInfo) -> Sequence[Provider]:
    host, by_tiles = "test_gemm.py::test_rows_alone_and_together", "test_any_device.py::test_gemm"
    return [
        _provider("linear", "gemm.linear", "linear:TiledLinear", _host_linear, proof=host),
        _provider("batched", "gemm.batched", "linear:TiledBatchedLinear", _host_linear, proof=host),
        _provider("grouped", "gemm.grouped", "linear:TiledGroupedLinear", _host_linear, proof=host),
        _provider(
            "triton_linear",
            "gemm.linear",
            "triton_gemm:FixedTileLinear",
            _triton_linear,
            proof="test_triton.py::test_gemm",
            caps=GRAPH_CAPS,
        ),
        _provider("linear_by_tiles", "gemm.linear", "by_tiles:LinearByTiles", _any, proof=by_tiles),
        _provider("batched_by_tiles", "gemm.batched", "by_tiles:BatchedLinearByTiles", _any, proof=by_tiles),
        _provider(
            "grouped_by_tiles",
            "gemm.grouped",
            "by_tiles:GroupedLinearByTiles",
            _any,
            proof=by_tiles,
            caps=CAPS | {"packed_weights"},
        ),
    ]


@hookimpl
def deepinfer_attention(device: DeviceInfo) -> Sequence[Provider]:
    cached = _host("dtype", "cache_dtype")
    host, alone = "test_attention.py::test_rows_alone_and_together", "test_any_device.py::test_attention"

    def attention(name: str, op: str, target: str, supports: Verdict, proof: str) -> Provider:
        caps = KV_CAPS | {"block_attention"} if name == "paged_rows_alone" else KV_CAPS
        if name == "paged_transposed":
            caps = CAPS | {"kv_layout:transposed_keys"}
        return _provider(name, f"attention.{op}", target, supports, proof=proof, caps=caps)

    return [
        attention("paged", "paged", "attention:PagedAttention", _host_paged, host),
        attention("paged_transposed", "paged", "transposed_attention:TransposedPagedAttention", _host_transposed, host),
        attention("sparse", "sparse", "sparse_attention:SparseAttention", cached, host),
        attention("index_topk", "index_topk", "index_topk:IndexTopK", cached, host),
        attention("compress", "compress", "compress:Compress", cached, host),
        attention("paged_rows_alone", "paged", "rows_alone:PagedRowsAlone", _any, alone),
        attention("sparse_rows_alone", "sparse", "rows_alone:SparseRowsAlone", _any, alone),
        attention("index_topk_rows_alone", "index_topk", "rows_alone:IndexTopKRowsAlone", _any, alone),
        attention("compress_rows_alone", "compress", "rows_alone:CompressRowsAlone", _any, alone),
    ]


@hookimpl
def deepinfer_moe_communication(device: DeviceInfo) -> Sequence[Provider]:
    proof = "test_moe.py::test_rows_alone_and_together"
    return [
        _provider("route", "moe.route", "moe:Route", _host(), proof=proof),
        _provider("route_rows_alone", "moe.route", "rows_alone:RouteRowsAlone", _any, proof=proof),
        _provider("local", "moe.exchange", "moe:LocalExchange", _any, proof=proof),
        _provider(
            "triton_local", "moe.exchange", "triton_ops:OrderedExchange", _triton, proof="test_triton.py::test_combine"
        ),
    ]


@hookimpl
def deepinfer_pointwise(device: DeviceInfo) -> Sequence[Provider]:
    float32 = _host("dtype")
    host, by_tiles = "test_pointwise.py::test_rows_alone_and_together", "test_any_device.py::test_pointwise"

    def pointwise(name: str, op: str, target: str, supports: Verdict, proof: str = host) -> Provider:
        caps = GRAPH_CAPS if name.startswith("triton_") else CAPS
        return _provider(name, f"pointwise.{op}", target, supports, proof=proof, caps=caps)

    return [
        pointwise("rms_norm", "rms_norm", "pointwise:RmsNorm", float32),
        pointwise("triton_rms_norm", "rms_norm", "triton_ops:RowNorm", _triton, "test_triton.py::test_norm"),
        pointwise("swiglu", "swiglu", "pointwise:Swiglu", float32),
        pointwise("rope", "rope", "pointwise:Rope", float32),
        pointwise("hyper_connection", "hyper_connection", "hyper_connection:HyperConnection", float32),
        pointwise("hyper_head", "hyper_head", "hyper_connection:HyperHead", float32),
        pointwise("quantise_dequantise", "quantise_dequantise", "rounding:QuantiseDequantise", _any),
        pointwise("rms_norm_by_tiles", "rms_norm", "by_tiles:RmsNormByTiles", _any, by_tiles),
        pointwise("rope_by_tiles", "rope", "by_tiles:RopeByTiles", _any, by_tiles),
        pointwise("swiglu_by_tiles", "swiglu", "by_tiles:SwigluByTiles", _any, by_tiles),
        pointwise("hyper_connection_by_tiles", "hyper_connection", "by_tiles:HyperConnectionByTiles", _any, by_tiles),
        pointwise("hyper_head_by_tiles", "hyper_head", "by_tiles:HyperHeadByTiles", _any, by_tiles),
    ]


def _stage(
    name: str,
    stage: str,
    target: str = "sampling:StageByRow",
    serves: Verdict = _any,
    proof: str = "test_sampling.py::test_rows_alone_and_together",
) -> Provider:
    def supports(request: SamplingRequest) -> Supports:
        return serves(request) if request.stage == stage else no(f"serves stage {stage!r}, not {request.stage!r}")

    return _provider(name, SamplingRequest.op, target, supports, proof=proof, caps=CAPS | {"device_state"})


@hookimpl
def deepinfer_sampling(device: DeviceInfo) -> Sequence[Provider]:
    return [
        *(_stage(f"{stage}_by_row", stage) for stage in ("min_p", "top_k", "top_p", "draw")),
        _stage("verify_by_row", "verify", "sampling:VerifyByRow"),
        _stage("logprobs_by_row", "logprobs", "sampling:LogprobsByRow"),
        _stage("triton_logprobs", "logprobs", "triton_ops:RowLogprobs", _triton, "test_triton.py::test_log_softmax"),
    ]


@hookimpl
def deepinfer_commands() -> Sequence[CommandInfo]:
    return [
        CommandInfo(
            name="verify-determinism",
            help="Run a model in every kind of company and show where a bit moved, if one did.",
            command=LazyRef("deepinfer_batch_invariance.verify.command:verify_determinism"),
        )
    ]
