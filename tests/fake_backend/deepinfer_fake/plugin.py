"""What the backend declares. Imports no torch and opens no device."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_core.api import (
    AppendTokensRequest,
    DeviceInfo,
    KVLayoutRequest,
    LazyRef,
    LinearRequest,
    PluginInfo,
    ProbeEnv,
    Provider,
    RmsNormRequest,
    Supports,
    hookimpl,
    no,
    yes,
)

BACKEND = "fake"
CAPS = frozenset({"deterministic", "spec_verify"})
SCORE = 100


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name="fake", api=(1, 1), help="A device that is not there, for tests")


@hookimpl
def deepinfer_probe(env: ProbeEnv) -> Sequence[DeviceInfo]:
    """Always there. A real backend looks at device files below ``env.root``."""
    megabytes = int(env.environ.get("FAKE_MEMORY_MIB", "512"))
    return [
        DeviceInfo(
            backend=BACKEND,
            type="cpu",
            arch="f1",
            count=1,
            memory=megabytes << 20,
            priority=-1,
            evidence=f"pretended, {megabytes} MiB",
            provider=LazyRef("deepinfer_fake.device:FakeDevice"),
            fallback="warn",
        )
    ]


def _linear(request: LinearRequest) -> Supports:
    for field, value in (("dtype", request.dtype), ("out_dtype", request.out_dtype)):
        if value != "float32":
            return no(f"computes in float32; {field} is {value}")
    if request.weight_dtype.startswith(("fp8:", "fp4:")):
        return no(f"does not decode weights stored as {request.weight_dtype}")
    return yes(SCORE)


def _norm(request: RmsNormRequest) -> Supports:
    return yes(SCORE) if request.dtype == "float32" else no(f"computes in float32; dtype is {request.dtype}")


def _always(request: KVLayoutRequest | AppendTokensRequest) -> Supports:
    return yes(SCORE)


@hookimpl
def deepinfer_kv_layout(device: DeviceInfo) -> Sequence[Provider]:
    if device.backend != BACKEND:
        return []
    # Rows lie as in the reference's layout, so it has that name: operators that know the one know the other.
    build = LazyRef("deepinfer_fake.operators:PoolLayout")
    return [Provider(name="paged", op="kv_layout.paged", build=build, caps=CAPS, supports=_always)]


@hookimpl
def deepinfer_gemm(device: DeviceInfo) -> Sequence[Provider]:
    if device.backend != BACKEND:
        return []
    build = LazyRef("deepinfer_fake.operators:Linear")
    return [Provider(name="linear", op="gemm.linear", build=build, caps=CAPS, supports=_linear)]


@hookimpl
def deepinfer_pointwise(device: DeviceInfo) -> Sequence[Provider]:
    if device.backend != BACKEND:
        return []
    build = LazyRef("deepinfer_fake.operators:RmsNorm")
    return [Provider(name="rms_norm", op="pointwise.rms_norm", build=build, caps=CAPS, supports=_norm)]


@hookimpl
def deepinfer_runner_ops(device: DeviceInfo) -> Sequence[Provider]:
    if device.backend != BACKEND:
        return []
    build = LazyRef("deepinfer_fake.operators:AppendTokens")
    caps = CAPS | {"device_state"}
    return [Provider(name="append_tokens", op="runner.append_tokens", build=build, caps=caps, supports=_always)]
