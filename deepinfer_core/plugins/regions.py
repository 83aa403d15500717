"""Which regions serve in place of their parts, or beside them.

A region outranks its parts: it is chosen when a plugin's provider is eligible for it. Its parts serve when none is,
when the user's list for it says ``"parts"`` before anything that can be met, or when a list names one of the parts.
A region whose parts are all among those of one before it is a part of that one, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import attrs

from deepinfer_core.api import PARTS, Choice, Loser, OpRequest, PlanError, Provider, Region

from .choice import Offer, ask_all, by_user, check_slot, keys_of, record, top_of, unique_providers
from .requests import request_to_data


@attrs.frozen(kw_only=True)
class ChosenRegions:
    """Regions that serve, and those whose parts do. ``left``: slots of the parts that nothing replaces."""

    chosen: tuple[Choice, ...]
    declined: tuple[Choice, ...]
    left: frozenset[str]


def choose_regions(
    regions: Mapping[str, Region],
    ops: Mapping[str, OpRequest],
    providers: Sequence[tuple[str, Provider]],
    *,
    user: Mapping[str, Sequence[str]],
    backend_plugin: str,
) -> ChosenRegions:
    """Decide for every region of a model.

    Args:
        regions: slot -> region; their slots are none of ``ops``.
        ops: slot -> request of the model's operators.
        providers, user, backend_plugin: as for :func:`choose`.

    Raises:
        PlanError: an explicit request unmet, equal scores, or a region that names a slot it cannot have.
    """
    unique = unique_providers(providers)
    chosen: list[Choice] = []
    declined: list[Choice] = []
    replaced: dict[str, list[str]] = {}
    inner = _inner(regions)
    for slot, region in regions.items():
        check_slot(slot)
        if slot in ops or not set(region.replaces) <= set(ops):
            raise PlanError(f"region {slot!r}: needs a slot of its own, and may replace operators of its model only")
        outer = next((c.slot for c in chosen if slot in inner[c.slot]), None)
        if outer is not None:
            reason = f"a part of {outer}"
            found = _declined(slot, region, ask_all(region.request, unique), reason, by_user=True)
            declined.append(attrs.evolve(found, source="score"))
            continue
        parts = {part: ops[part] for part in region.replaces} | {s: regions[s].request for s in inner[slot]}
        choice = _decide(slot, region, parts, unique, user, backend_plugin)
        (declined if choice.provider == PARTS else chosen).append(choice)
        concerned = set() if region.beside else set(region.replaces)
        if choice.provider == PARTS:  # of its parts, those of the regions within it are for these to say
            concerned.difference_update(part for s in inner[slot] for part in regions[s].replaces)
        for part in concerned:
            replaced.setdefault(part, []).append(slot)
    serving = {choice.slot for choice in chosen}
    gone = {part for part, slots in replaced.items() if serving.issuperset(slots)}
    return ChosenRegions(chosen=tuple(chosen), declined=tuple(declined), left=frozenset(ops) - gone)


def _inner(regions: Mapping[str, Region]) -> dict[str, tuple[str, ...]]:
    """Slot of a region -> slots of the regions behind it that are parts of it."""
    slots = list(regions)

    def within(outer: Region, other: Region) -> bool:
        return not outer.beside and not other.beside and set(other.replaces) <= set(outer.replaces)

    return {
        slot: tuple(later for later in slots[place + 1 :] if within(regions[slot], regions[later]))
        for place, slot in enumerate(slots)
    }


def _decide(
    slot: str,
    region: Region,
    parts: Mapping[str, OpRequest],
    providers: Mapping[str, tuple[str, Provider]],
    user: Mapping[str, Sequence[str]],
    backend_plugin: str,
) -> Choice:
    request = region.request
    offers = ask_all(request, providers)
    key = next((key for key in keys_of(slot, request) if key in user), None)
    if key is not None:
        names = list(user[key])
        wanted = names[: names.index(PARTS)] if PARTS in names else names
        try:
            if wanted:
                offer = by_user(slot, request, offers, key, wanted, providers)
                return _in_place(region, record(slot, request, offer, "user", offers, key))
        except PlanError as error:
            if wanted == names:
                raise
            return _declined(slot, region, offers, str(error), by_user=True)
        return _declined(slot, region, offers, f"ops.{json.dumps(key)} says so", by_user=True)
    named = next((k for part, asked in parts.items() for k in keys_of(part, asked) if k in user), None)
    if named is not None:
        return _declined(slot, region, offers, f"ops.{json.dumps(named)} names a part", by_user=True)
    own = [o for o in offers if o.score is not None and not o.provider.fallback and not o.provider.on_request]
    if not own:
        return _declined(slot, region, offers, "no plugin's provider is eligible", by_user=False)
    offer = top_of(slot, request, own, backend_plugin)
    return _in_place(region, record(slot, request, offer, "score", offers, None))


def _in_place(region: Region, choice: Choice) -> Choice:
    place = "beside" if region.beside else "in place of"
    reason = choice.reason or f"{place} {', '.join(region.replaces)}"
    return attrs.evolve(choice, reason=reason, replaces=region.replaces)


def _declined(slot: str, region: Region, offers: Sequence[Offer], reason: str, *, by_user: bool) -> Choice:
    request = region.request
    losers = []
    for offer in offers:
        why = offer.reason if offer.score is None else reason
        if offer.score is not None and not by_user:
            why = "reference: its parts are the same" if offer.provider.fallback else "only on request"
        losers.append(Loser(provider=offer.label, reason=why, score=offer.score))
    return Choice(
        slot=slot,
        op=request.op,
        request=request_to_data(request),
        provider=PARTS,
        score=0,
        reason=reason,
        source="user" if by_user else "score",
        losers=tuple(losers),
        replaces=region.replaces,
    )
