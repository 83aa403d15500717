"""A backend written against interface 1.0: it knows the names, fields and arguments of that minor and no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from deepinfer_core.api import (
    BuildContext,
    DeviceInfo,
    EnginePlan,
    LazyRef,
    LinearRequest,
    Objection,
    OpRequest,
    PagedAttentionRequest,
    PluginInfo,
    ProbeEnv,
    Provider,
    RmsNormRequest,
    SamplingRequest,
    StageArgument,
    StageInfo,
    Supports,
    hookimpl,
    no,
    yes,
)

BACKEND = "first"
KNOWN = frozenset({"deterministic", "spec_verify"})
STARTED: list[int] = []


@attrs.frozen(kw_only=True)
class Settings:
    tile: int = attrs.field(default=16)


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name=BACKEND, api=(1, 0), help="written against interface 1.0", settings=Settings)


@hookimpl
def deepinfer_probe(env: ProbeEnv) -> Sequence[DeviceInfo]:
    assert env.root == "/"
    return [
        DeviceInfo(
            backend=BACKEND,
            type="cpu",
            arch="one",
            count=1,
            memory=1 << 32,
            priority=-2,
            evidence="always there",
            provider=LazyRef(f"{__name__}:open_device"),
            fallback="warn",
            legacy_names=("oldest",),
        )
    ]


def open_device(info: DeviceInfo) -> Any:
    from first_minor.device import FirstDevice

    return FirstDevice(info)


class Norm:
    def __init__(self, request: RmsNormRequest, context: BuildContext) -> None:
        self._eps = request.eps

    def run(self, x: Any, weight: Any) -> Any:
        return x / (x * x).mean(-1, keepdim=True).add(self._eps).sqrt() * weight

    def add(self, x: Any, residual: Any, weight: Any) -> Any:
        total = residual.add_(x)
        return self.run(total, weight), total


class Delegate:
    """Any operator, by the reference; in tiles of rows where rows are apart."""

    def __init__(self, request: OpRequest, context: BuildContext) -> None:
        assert isinstance(context.settings, Settings)
        assert min(context.max_tokens, context.max_requests, context.max_model_len, context.num_threads) > 0
        self._right = context.reference(request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._right, name)

    def run(self, *arguments: Any) -> Any:
        return self._right.run(*arguments)

    def plan(self, *arguments: Any) -> Any:
        return self._right.plan(*arguments)

    def prepare(self, *arguments: Any) -> Any:
        return self._right.prepare(*arguments)


def _float32(request: Any) -> Supports:
    return yes(50) if request.dtype == "float32" else no(f"dtype {request.dtype}")


def _plain(request: PagedAttentionRequest) -> Supports:
    if request.window is not None or request.softcap is not None or request.sinks:
        return no("full attention only")
    return _float32(request)


def _linear(request: LinearRequest) -> Supports:
    return no("no bias") if request.bias else _float32(request)


def _draw(request: SamplingRequest) -> Supports:
    return yes(50) if request.stage == "draw" else no(f"serves draw, not {request.stage}")


def _first_stage(request: SamplingRequest) -> Supports:
    return yes(50) if request.stage == "first_stage" else no(f"serves first_stage, not {request.stage}")


class FirstStage:
    """Adds the request's argument to every logit, which changes no draw."""

    def __init__(self, request: SamplingRequest, context: BuildContext) -> None:
        pass

    def run(self, logits: Any, batch: Any) -> Any:
        return logits + batch.state.extra["first"][batch.slots, None]


def _offer(name: str, op: str, build: Any, supports: Callable[[Any], Supports], more: Sequence[str] = ()) -> Provider:
    return Provider(name=name, op=op, build=build, caps=KNOWN | set(more), supports=supports)


@hookimpl
def deepinfer_pointwise(device: DeviceInfo) -> Sequence[Provider]:
    return [_offer("norm", "pointwise.rms_norm", Norm, _float32)] if device.backend == BACKEND else []


@hookimpl
def deepinfer_gemm(device: DeviceInfo) -> Sequence[Provider]:
    return [_offer("linear", "gemm.linear", Delegate, _linear)] if device.backend == BACKEND else []


@hookimpl
def deepinfer_attention(device: DeviceInfo) -> Sequence[Provider]:
    if device.backend != BACKEND:
        return []
    return [_offer("paged", "attention.paged", Delegate, _plain, ["kv_layout:paged"])]


@hookimpl
def deepinfer_sampling(device: DeviceInfo) -> Sequence[Provider]:
    if device.backend != BACKEND:
        return []
    return [
        _offer("draw", "sampling.stage", Delegate, _draw, ["device_state"]),
        _offer("first_stage", "sampling.stage", FirstStage, _first_stage, ["device_state"]),
    ]


@hookimpl
def deepinfer_sampling_stages() -> Sequence[StageInfo]:
    return [
        StageInfo(name="first_stage", after="top_p", arguments={"first": StageArgument(off=0.0, low=0.0, high=1.0)})
    ]


@hookimpl
def deepinfer_check_plan(plan: EnginePlan) -> Sequence[Objection]:
    return [Objection("warning", "runs on the first minor")] if plan.accelerator == BACKEND else []


@hookimpl
def deepinfer_worker_start(rank: int) -> None:
    STARTED.append(rank)
