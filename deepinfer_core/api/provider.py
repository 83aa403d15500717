"""What every operator family shares: lazy references, requests, demands, caps, providers.

A *request* describes one operator a model or the engine needs. A *provider* is one
implementation a plugin offers. A provider is eligible for a request if and only if

    request.demands <= provider.caps   and   provider.supports(request) says yes.

A provider written before a demand existed lacks the cap, and so refuses it without a line
of code. Nothing here imports torch: declaring a provider must cost nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs

if TYPE_CHECKING:
    import torch

    from .expert_parallel import ProcessGroup

Phase = Literal["mixed", "prefill", "decode"]
"""Which rows a step may hold. ``mixed`` is the engine's default: prefill chunks and decode rows together."""

ExtraValue = str | int | float | bool


@attrs.frozen
class LazyRef:
    """``"package.module:attribute"``, imported only when :meth:`load` is called."""

    target: str = attrs.field()

    @target.validator
    def _check(self, _: Any, value: str) -> None:
        module, _sep, attribute = value.partition(":")
        if not module or not attribute:
            raise ValueError(f"LazyRef {value!r}: expected 'package.module:attribute'")

    def load(self) -> Any:
        """Import the module and return the attribute. Import errors are the caller's to report."""
        module, _, attribute = self.target.partition(":")
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
        return found


def _frozen_demands(value: Any) -> frozenset[str]:
    return frozenset(value)


@attrs.frozen(kw_only=True)
class OpRequest:
    """One operator, described by everything that may decide who provides it.

    Attributes:
        phase: rows a step may hold (see :data:`Phase`).
        layer_kind: the model's own word for the layers that use it (``"full"``, ``"window"``), for the
            user's list and for ``explain``; ``""`` when the model has one kind.
        device_type: torch device type the operator runs on (``"cpu"``, or any other).
        demands: caps a provider must have (``"batch_invariant"``, ``"graph_capture"``, ``"spec_verify"``, ...).
        extras: vendor fields, each key namespaced as ``"vendor.field"``. Each adds the demand
            ``"extra:vendor.field"``, so that a provider which does not know the field refuses the request.
    """

    op: ClassVar[str] = ""

    phase: Phase = "mixed"
    layer_kind: str = ""
    device_type: str = "cpu"
    demands: frozenset[str] = attrs.field(factory=frozenset, converter=_frozen_demands)
    extras: Mapping[str, ExtraValue] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for key in self.extras:
            vendor, _, name = key.partition(".")
            if not vendor or not name:
                raise ValueError(f"extras key {key!r}: expected 'vendor.field'")
        echoed = frozenset(f"extra:{key}" for key in self.extras)
        if not echoed <= self.demands:
            object.__setattr__(self, "demands", self.demands | echoed)

    @property
    def cache_groups(self) -> tuple[str, ...]:
        """Cache groups read or written. The engine adds the demand ``kv_layout:<layout>`` for each."""
        return ()


@attrs.frozen
class Supports:
    """A provider's verdict. ``score`` is ``None`` for no; higher wins; the reference scores 0.

    A no needs a reason: it is what ``deepinfer explain`` shows.
    """

    score: int | None
    reason: str = ""

    def __bool__(self) -> bool:
        return self.score is not None


def yes(score: int, reason: str = "") -> Supports:
    """Supported, with this score (1 to 1000; the reference operators use 0)."""
    return Supports(score, reason)


def no(reason: str) -> Supports:
    """Not supported, because of ``reason`` (must not be empty)."""
    if not reason:
        raise ValueError("a refusal needs a reason")
    return Supports(None, reason)


@attrs.frozen(kw_only=True)
class BuildContext:
    """What a provider may use to build its operator. Built once per chosen operator, never in a step.

    Attributes:
        device: torch device the operator will run on.
        max_tokens: most rows (query tokens) of one step.
        max_requests: most requests of one step.
        max_model_len: longest context, tokens.
        num_threads: host threads the operator may use.
        settings: the plugin's own typed settings (instance of ``PluginInfo.settings``), or None.
        reference: returns the reference operator for a request, to delegate to. What the request demands beyond a cache
            layout remains the caller's to keep.
        group: the processes that share a model's experts; None where one process holds them all.
    """

    device: torch.device
    max_tokens: int
    max_requests: int
    max_model_len: int
    num_threads: int
    settings: Any
    reference: Callable[[OpRequest], Any]
    group: ProcessGroup | None = None


def _always(_: OpRequest) -> Supports:
    return yes(0)


@attrs.frozen(kw_only=True)
class Provider:
    """One implementation of one operator.

    Attributes:
        name: unique within the plugin; users write ``plugin:name``.
        op: the operator served, e.g. ``"gemm.linear"`` (``OpRequest.op`` of the request class).
        caps: demands this implementation meets.
        build: ``(request, BuildContext) -> operator``; a :class:`LazyRef` is imported only when chosen.
        supports: verdict on a request's geometry. Plain Python: no torch, no device.
        fallback: True for a definition-quality operator that serves anything (only the reference).
        on_request: True for one that is chosen only where the user's ``ops`` names it in full, ``plugin:name``: it
            trades something that nobody should lose unasked, or was not proved yet.
        proofs: cap -> the test that proves it, as pytest names it, shown by ``explain`` beside a choice that needed
            the cap. A claim nobody tested has none.
    """

    name: str
    op: str
    build: LazyRef | Callable[[Any, BuildContext], Any]
    caps: frozenset[str] = attrs.field(factory=frozenset, converter=_frozen_demands)
    supports: Callable[[Any], Supports] = _always
    fallback: bool = False
    on_request: bool = False
    proofs: Mapping[str, str] = attrs.field(factory=dict)
