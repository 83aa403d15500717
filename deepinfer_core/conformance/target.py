"""The backend under test, seen as the engine sees it: a device, providers, and who is chosen for a request."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import torch

from deepinfer_core.api import (
    BuildContext,
    Device,
    DeviceError,
    DeviceInfo,
    FallbackPolicy,
    KVLayoutRequest,
    LazyRef,
    NoDevice,
    OpRequest,
    PlanError,
    ProbeEnv,
    ProcessGroup,
    Provider,
    Stream,
    Supports,
)
from deepinfer_core.plugins import Registry, choose, choose_device, load_plugins
from deepinfer_core.plugins.choice import MAX_SCORE
from deepinfer_core.plugins.nearest import suggest

from .case import Mismatch, Refused

T = TypeVar("T")

REFERENCE = "reference"
HOST = "cpu"
MAX_TOKENS, MAX_REQUESTS, MAX_LENGTH = 512, 32, 4096
"""Limits that operators are built with: no case exceeds them."""


@attrs.frozen(kw_only=True)
class Chosen:
    """A provider that was chosen for a request, and the operator it built.

    ``own``: it is one of the backend's providers, not a reference operator that stands in.
    """

    label: str
    provider: Provider
    operator: Any
    own: bool


@attrs.define(kw_only=True, eq=False)
class Target:
    """A backend under test.

    Attributes:
        backend: name as users write it. plugin: who declared the device.
        providers: ``(plugin, provider)`` offered for the device.
        fallback: may reference operators stand in?
        demands: added to every request, as a feature adds them in the engine.
        wanted: ``plugin:provider`` that is asked wherever it takes a request, whatever its score.
        dtype: name of the dtype the backend computes 16-bit checkpoints in: the one that every tier asks for.
        reference: reference providers on the host, the definition.
        settings: plugin -> its settings, all at their defaults.
        registry: who declared all this. plugin_files: plugins of it that are not installed.
        group: the processes that share a model's experts, in one that has joined them.
        facts: what was found out once and is asked for by several cases. on_close: what to clean up.
    """

    backend: str
    plugin: str
    device: Device
    providers: Sequence[tuple[str, Provider]]
    reference: Sequence[tuple[str, Provider]]
    fallback: FallbackPolicy
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    registry: Registry | None = None
    plugin_files: Sequence[str] = ()
    wanted: Sequence[str] = ()
    demands: frozenset[str] = frozenset()
    group: ProcessGroup | None = None
    facts: dict[str, Any] = attrs.field(factory=dict)
    on_close: list[Callable[[], None]] = attrs.field(factory=list)
    dtype: str = ""
    _stream: Stream | None = None

    def __attrs_post_init__(self) -> None:
        self.dtype = self.dtype or self.device.default_dtype("bfloat16")

    # ---- operators

    def choose(self, request: OpRequest) -> Chosen:
        """The operator the engine would use for a request.

        Raises:
            Refused, Mismatch: as :meth:`choice`.
        """
        request = self._demanded(request)
        plugin, provider = self.choice(request)
        operator = _built(provider)(request, self._context(plugin, self.device.torch_device, self._any_reference))
        return Chosen(
            label=f"{plugin}:{provider.name}", provider=provider, operator=operator, own=not provider.fallback
        )

    def _demanded(self, request: OpRequest) -> OpRequest:
        if not isinstance(request, KVLayoutRequest):  # of which the engine demands nothing
            request = attrs.evolve(request, demands=request.demands | self.demands)
        return request

    def choice(self, request: OpRequest) -> tuple[str, Provider]:
        """The plugin and the provider that the engine would choose; nothing is built.

        Raises:
            Refused: no provider is eligible, with every candidate's reason.
            Mismatch: a provider that was asked gave no proper verdict.
        """
        request = self._demanded(request)
        for plugin, provider in self.providers:
            if provider.op == request.op and request.demands <= provider.caps:
                check_verdict(f"{plugin}:{provider.name}", provider, request)
        try:
            (choice,) = choose(
                {"slot": request},
                self.providers,
                user=self._wanted(request),
                fallback="allow" if self.fallback == "warn" else self.fallback,
                backend_plugin=self.plugin,
            )
        except PlanError as error:
            raise Refused(str(error).removeprefix("slot 'slot' ")) from error
        return next((p, q) for p, q in self.providers if q.op == request.op and f"{p}:{q.name}" == choice.provider)

    def _wanted(self, request: OpRequest) -> dict[str, tuple[str, ...]]:
        """The ``ops`` setting that asks for a provider of :attr:`wanted` where it takes the request."""
        for plugin, provider in self.providers:
            label = f"{plugin}:{provider.name}"
            eligible = label in self.wanted and provider.op == request.op and request.demands <= provider.caps
            if eligible and provider.supports(request):
                return {request.op: (label,)}
        return {}

    def oracle(self, request: OpRequest) -> Any:
        """The reference operator for a request, on the host."""
        for plugin, provider in self.reference:
            if provider.op == request.op and request.demands <= provider.caps and provider.supports(request):
                return _built(provider)(request, self._context(plugin, torch.device("cpu"), self.oracle))
        raise LookupError(f"no reference operator defines {request}")

    def _any_reference(self, request: OpRequest) -> Any:
        # As in the engine: other demands are for whoever delegates to keep.
        layouts = {demand for demand in request.demands if demand.startswith("kv_layout:")}
        for plugin, provider in self.providers:
            serves = provider.fallback and provider.op == request.op
            if serves and layouts <= provider.caps and provider.supports(request):
                return _built(provider)(request, self._context(plugin, self.device.torch_device, self._any_reference))
        raise PlanError(f"no reference operator for {request.op}")

    def _context(self, plugin: str, device: torch.device, reference: Callable[[OpRequest], Any]) -> BuildContext:
        return BuildContext(
            device=device,
            max_tokens=MAX_TOKENS,
            max_requests=MAX_REQUESTS,
            max_model_len=MAX_LENGTH,
            num_threads=self.device.num_threads,
            settings=self.settings.get(plugin),
            reference=reference,
            group=self.group,
        )

    # ---- the device

    def work(self, fn: Callable[[], T]) -> T:
        """Run device work as the engine does: one closure on a stream, then wait for its event."""
        if self._stream is None:
            self._stream = self.device.stream(overlap=self.device.overlaps)

        def closure() -> T:
            with torch.inference_mode():
                return fn()

        return self._stream.submit(closure).wait()

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A device tensor with the values of a host tensor, through the device's own ``upload``."""
        host = tensor.detach().contiguous()
        if host.dtype in _UPLOADED_AS_FLOAT32:
            return self.device.upload(host.to(torch.float32).numpy()).to(host.dtype)
        return self.device.upload(host.clone().numpy())

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host copy of a device tensor, through the device's own ``download``."""
        if tensor.dtype in _UPLOADED_AS_FLOAT32:
            wide = self.work(lambda: tensor.to(torch.float32))
            return torch.from_numpy(self.device.download(wide).copy()).to(tensor.dtype)
        if tensor.dtype == torch.float8_e4m3fn:  # no type of numpy's
            codes = self.work(lambda: tensor.view(torch.uint8))
            return torch.from_numpy(self.device.download(codes).copy()).view(tensor.dtype)
        return torch.from_numpy(self.device.download(tensor).copy())

    def close(self) -> None:
        """Release the stream and what cases left behind. Idempotent."""
        while self.on_close:
            self.on_close.pop()()
        if self._stream is not None:
            self._stream.close()
            self._stream = None


_UPLOADED_AS_FLOAT32 = (torch.bfloat16, torch.float16)


def _built(provider: Provider) -> Callable[[Any, BuildContext], Any]:
    build: Any = provider.build
    return build.load() if isinstance(build, LazyRef) else build  # type: ignore[no-any-return]


def check_verdict(label: str, provider: Provider, request: OpRequest) -> None:
    """A yes has a score, a no has a reason, and asking raises nothing.

    Raises:
        Mismatch: naming the provider and what it answered.
    """
    try:
        verdict: Any = provider.supports(request)
    except Exception as error:
        raise Mismatch(
            f"{request.op} by {label}: supports() raised {type(error).__name__}: {error}; expected a verdict"
        ) from error
    lowest = 0 if provider.fallback else 1
    if not isinstance(verdict, Supports):
        raise Mismatch(f"{request.op} by {label}: supports() returned {verdict!r}; expected yes(score) or no(reason)")
    if verdict.score is None and not verdict.reason:
        raise Mismatch(f"{request.op} by {label}: refused without a reason; expected no(reason)")
    if verdict.score is not None and not lowest <= verdict.score <= MAX_SCORE:
        raise Mismatch(f"{request.op} by {label}: score {verdict.score}; expected {lowest} to {MAX_SCORE}")


class AbsentDevice:
    """Stands for a device that is not in this machine: enough for what is asked without hardware."""

    num_threads = 1
    overlaps = False

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info

    def default_dtype(self, stored: str) -> str:
        return stored

    def __getattr__(self, name: str) -> Any:
        raise DeviceError(f"{self.info.backend}: {self.info.evidence}, so {name} cannot be asked")


def open_without_device(backend: str, plugins: Sequence[str] = ()) -> Target:
    """A target for hygiene alone: the plugin of this name, or the one that says why it has no such device here.

    Raises:
        DeviceError: no plugin answers to the name.
    """
    registry = load_plugins(files=plugins)
    silent = registry.collect("deepinfer_probe", env=ProbeEnv(environ=dict(os.environ)))
    names = [plugin for plugin, answer in silent if answer.backend == backend] or [backend]
    if names[0] not in registry.plugins:
        raise DeviceError(f"backend {backend!r}: no plugin has such a device, and none has this name")
    reasons = [answer.reason for plugin, answer in silent if isinstance(answer, NoDevice) and plugin == names[0]]
    info = DeviceInfo(
        backend=backend,
        type=backend,
        arch="",
        count=0,
        memory=0,
        priority=0,
        evidence=f"not in this machine{''.join(f' ({reason})' for reason in reasons)}",
        provider=LazyRef(f"{__name__}:AbsentDevice"),
    )
    device: Any = AbsentDevice(info)
    return Target(
        backend=backend,
        plugin=names[0],
        device=device,
        providers=(),
        reference=(),
        fallback="error",
        registry=registry,
        plugin_files=tuple(plugins),
    )


def open_target(backend: str, plugins: Sequence[str] = (), wanted: Sequence[str] = ()) -> Target:
    """Find a backend among the installed plugins and open its device.

    Args:
        backend: as after ``--accelerator``; ``"reference"``: the reference operators alone, on the host.
        plugins: plugins that are not installed, as in ``plugins.paths``.
        wanted: providers to ask wherever they take a request, whatever their scores.

    Raises:
        PluginError, DeviceError: the backend is broken, or has no device here.
        PlanError: a wanted provider is not there.
    """
    registry = load_plugins(files=plugins)
    name = HOST if backend == REFERENCE else backend
    chosen = choose_device(registry, name, dict(os.environ))
    device = chosen.open()
    providers = registry.providers(chosen.device)
    labels = {f"{plugin}:{provider.name}" for plugin, provider in providers}
    for label in wanted:
        if label not in labels:
            raise PlanError(f"--provider {label!r}: there is no such provider{suggest(label, labels)}")
    reference = [item for item in registry.providers(attrs.evolve(chosen.device, type="cpu")) if item[0] == REFERENCE]
    settings = {name: p.info.settings() for name, p in registry.plugins.items() if p.info.settings is not None}
    return Target(
        backend=backend,
        plugin=REFERENCE if backend == REFERENCE else chosen.plugin,
        device=device,
        providers=[item for item in providers if backend != REFERENCE or item[0] == REFERENCE],
        reference=reference,
        fallback="allow" if backend == REFERENCE else chosen.device.fallback or "error",
        settings=settings,
        registry=registry,
        plugin_files=tuple(plugins),
        wanted=tuple(wanted),
    )
