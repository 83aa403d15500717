"""What the backend declares. Imports no torch and opens no device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from deepinfer_core.api import DeviceInfo, LazyRef, NoDevice, PluginInfo, ProbeEnv, Provider, Supports, hookimpl

from . import support
from .probe import BACKEND, find

CAPS = frozenset({"deterministic", "spec_verify"})
KV_CAPS = CAPS | {"kv_layout:paged"}


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name="ascend950", api=(1, 1), help="Huawei Ascend 950 (not run on hardware)")


@hookimpl
def deepinfer_probe(env: ProbeEnv) -> Sequence[DeviceInfo | NoDevice]:
    return [find(env)]


def _provider(
    name: str,
    op: str,
    target: str,
    supports: Callable[[Any], Supports],
    caps: frozenset[str] = CAPS,
    on_request: bool = False,
) -> Provider:
    return Provider(
        name=name,
        op=op,
        build=LazyRef(f"deepinfer_ascend950.operators.{target}"),
        caps=caps,
        supports=supports,
        on_request=on_request,
    )


def _mine(device: DeviceInfo, providers: Sequence[Provider]) -> Sequence[Provider]:
    return providers if device.backend == BACKEND else []


@hookimpl
def deepinfer_attention(device: DeviceInfo) -> Sequence[Provider]:
    return _mine(
        device,
        [
            _provider("write_kv", "attention.write_kv", "write_kv:WriteKV", support.write_kv, KV_CAPS),
            _provider(
                "triton_index", "attention.index_topk", "index_topk:IndexTopK", support.index_topk, KV_CAPS, True
            ),
            _provider("triton_compress", "attention.compress", "compress:Compress", support.compress, KV_CAPS, True),
            _provider("fused_infer", "attention.paged", "paged_attention:PagedAttention", support.paged, KV_CAPS),
        ],
    )


@hookimpl
def deepinfer_gemm(device: DeviceInfo) -> Sequence[Provider]:
    return _mine(
        device,
        [
            _provider("linear", "gemm.linear", "linear:Linear", support.linear),
            _provider("batched", "gemm.batched", "linear:BatchedLinear", support.linear),
            _provider("grouped", "gemm.grouped", "grouped_linear:GroupedLinear", support.grouped),
        ],
    )


@hookimpl
def deepinfer_moe_communication(device: DeviceInfo) -> Sequence[Provider]:
    return _mine(device, [_provider("local", "moe.exchange", "exchange:LocalExchange", support.exchange)])


@hookimpl
def deepinfer_pointwise(device: DeviceInfo) -> Sequence[Provider]:
    return _mine(
        device,
        [
            _provider("rms_norm", "pointwise.rms_norm", "rms_norm:RmsNorm", support.pointwise),
            _provider("rope", "pointwise.rope", "rope:Rope", support.rope),
            _provider("swiglu", "pointwise.swiglu", "swiglu:Swiglu", support.pointwise),
            _provider(
                "mhc_post",
                "pointwise.hyper_connection",
                "hyper_connection:HyperConnection",
                support.hyper_connection,
            ),
            _provider("triton_mix", "pointwise.hyper_connection", "hyper_mix:HyperMix", support.hyper_mix, CAPS, True),
        ],
    )
