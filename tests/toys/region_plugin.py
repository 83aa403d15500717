"""A plugin with the regions of the dense models, on the host; it counts its calls in ``CALLS``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs

from deepinfer_core.api import DeviceInfo, LazyRef, OpRequest, PluginInfo, Provider, hookimpl, yes

CALLS: Counter[str] = Counter()


class Counted:
    """The reference's region; every call of ``run`` counts."""

    def __init__(self, request: OpRequest, context: Any) -> None:
        kept = {demand for demand in request.demands if demand.startswith("kv_layout:")}
        self._right = context.reference(attrs.evolve(request, demands=kept))
        self._op = request.op

    def __getattr__(self, name: str) -> Any:
        return getattr(self._right, name)

    def run(self, *arguments: Any, **named: Any) -> Any:
        CALLS[self._op] += 1
        return self._right.run(*arguments, **named)


class AttentionInputs(Counted):
    def plan(self, layout: Any) -> Any:
        return self._right.plan(layout)


class GatedLinear(Counted):
    def prepare(self, weights: Any, bias: Any = None) -> Any:
        return self._right.prepare(weights, bias)


class BetweenAttention(Counted):
    def prepare(self, part: Any, weights: Any, bias: Any = None) -> Any:
        return self._right.prepare(part, weights, bias)

    def first(self, residual: Any, norm: Any, qkv: Any) -> Any:
        return self._right.first(residual, norm, qkv)


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name="region_plugin", help="regions that count")


@hookimpl
def deepinfer_fused(device: DeviceInfo) -> Sequence[Provider]:
    caps = frozenset({"deterministic", "spec_verify", "kv_layout:paged"})
    return [
        Provider(
            name=name,
            op=f"fused.{name}",
            build=LazyRef(f"toys.region_plugin:{target}"),
            caps=caps,
            supports=lambda _: yes(500),
        )
        for name, target in (
            ("attention_inputs", "AttentionInputs"),
            ("between_attention", "BetweenAttention"),
            ("gated_linear", "GatedLinear"),
        )
    ]
