"""How the blocks of each cache group lie in memory: chosen first, among the layouts that its operators can follow.

The layout with the highest score is tried. Where an operator that touches the group has no provider for it, the next
one is, unless the user named the first; ``explain`` shows which operator stood in its way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import attrs

from deepinfer_core.api import CacheGroupSpec, Choice, OpRequest, PlanError, Provider, no

Providers: TypeAlias = Sequence[tuple[str, Provider]]
Decide: TypeAlias = Callable[[Mapping[str, OpRequest], Providers], tuple[Choice, ...]]
Refused: TypeAlias = dict[str, dict[str, str]]
"""Slot of a layout -> label of a provider -> why it was refused."""
Located: TypeAlias = Callable[[OpRequest], OpRequest]
T = TypeVar("T")

_SLOT = "kv_layout_"


def group_slot(group: CacheGroupSpec) -> str:
    """Slot name of a cache group's layout."""
    return _SLOT + group.name


def choose_with_layouts(
    layouts: Mapping[str, OpRequest],
    requests: Mapping[str, OpRequest],
    providers: Providers,
    decide: Decide,
    complete: Callable[[Located], T],
) -> tuple[tuple[Choice, ...], T]:
    """The choices of ``layouts``, in their order, and what ``complete`` made of them.

    Args:
        layouts: by :func:`group_slot`. requests: of the operators that may touch the groups.
        complete: decides the rest. It gets a function that adds to a request the demands for its groups' layouts, and
            raises PlanError where something cannot be served.

    Raises:
        PlanError: no combination can be met; the error is that of the last one tried.
    """
    refused: Refused = {}
    while True:
        chosen = _decide_layouts(layouts, refused, providers, decide)
        try:
            return tuple(chosen.values()), complete(_located(chosen))
        except PlanError:
            if not _refuse(layouts, requests, chosen, refused, providers, decide):
                raise


def _located(chosen: Mapping[str, Choice]) -> Located:
    def located(request: OpRequest) -> OpRequest:
        names = (chosen[_SLOT + group].provider.partition(":")[2] for group in request.cache_groups)
        demands = {f"kv_layout:{name}" for name in names}
        return attrs.evolve(request, demands=request.demands | demands) if demands else request

    return located


def _decide_layouts(
    layouts: Mapping[str, OpRequest], refused: Refused, providers: Providers, decide: Decide
) -> dict[str, Choice]:
    """Choice by slot, with all slots that refuse nothing asked at once."""
    free = {slot: request for slot, request in layouts.items() if slot not in refused}
    found = dict(zip(free, decide(free, providers), strict=True))
    for slot in refused:
        (found[slot],) = decide({slot: layouts[slot]}, _without(providers, layouts[slot].op, refused[slot]))
    return {slot: found[slot] for slot in layouts}


def _without(providers: Providers, op: str, refused: Mapping[str, str]) -> Providers:
    def answer(plugin: str, provider: Provider) -> Provider:
        reason = refused.get(f"{plugin}:{provider.name}")
        if provider.op != op or reason is None:
            return provider
        return attrs.evolve(provider, supports=lambda request: no(reason))

    return [(plugin, answer(plugin, provider)) for plugin, provider in providers]


def _refuse(
    layouts: Mapping[str, OpRequest],
    requests: Mapping[str, OpRequest],
    chosen: Mapping[str, Choice],
    refused: Refused,
    providers: Providers,
    decide: Decide,
) -> bool:
    """Refuse the layouts that some operator cannot follow, where there is another; False when nothing changed."""
    changed, located = False, _located(chosen)
    for slot, request in requests.items():
        if not request.cache_groups:
            continue
        try:
            decide({slot: located(request)}, providers)
        except PlanError as error:
            for group in request.cache_groups:
                where = _SLOT + group
                label = chosen[where].provider
                reasons = {**refused.get(where, {}), label: f"slot {slot!r} could not be served in it: {error}"}
                if chosen[where].source == "user" or not _possible(layouts[where], where, reasons, providers, decide):
                    continue
                refused[where], changed = reasons, True
    return changed


def _possible(request: OpRequest, slot: str, reasons: Mapping[str, str], providers: Providers, decide: Decide) -> bool:
    try:
        decide({slot: request}, _without(providers, request.op, reasons))
    except PlanError:
        return False
    return True
