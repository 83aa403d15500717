"""Who provides each operator: the user's list, then score, then the reference.

A request is eligible for a provider iff its demands are among the provider's caps and ``supports`` says yes.
An explicit request is met or it is an error that lists every candidate's reason; it never degrades.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from keyword import iskeyword
from typing import Literal

import attrs

from deepinfer_core.api import (
    Choice,
    FallbackPolicy,
    Loser,
    OpRequest,
    PlanError,
    Provider,
    SamplingRequest,
    Supports,
)

from .failure import cause_line, log
from .nearest import suggest
from .packages import package_hint
from .requests import request_to_data

MAX_SCORE = 1000


@attrs.frozen
class Offer:
    """A provider's answer to one request. ``score`` is None when it is not eligible, and ``reason`` says why."""

    label: str
    plugin: str
    provider: Provider
    score: int | None
    reason: str


def choose(
    requests: Mapping[str, OpRequest],
    providers: Sequence[tuple[str, Provider]],
    *,
    user: Mapping[str, Sequence[str]],
    fallback: FallbackPolicy,
    backend_plugin: str,
) -> tuple[Choice, ...]:
    """Choose one provider for every slot.

    Args:
        requests: slot (an identifier) -> request.
        providers: ``(plugin, provider)`` of all loaded plugins, as :meth:`Registry.collect` returns them.
        user: the ``ops`` setting. Keys, most specific first: a slot, ``sampling.<stage>``,
            ``op/layer_kind/phase``, ``op/layer_kind``, ``op``; values name ``plugin:provider`` or ``plugin`` in
            order of preference. Keys that match no slot are :func:`check_user_keys`'s business.
        fallback: what happens where only reference operators are eligible.
        backend_plugin: plugin of the chosen device; suggested first where the user must decide.

    Raises:
        PlanError: no eligible provider, an explicit request unmet, an unknown name, or equal scores.
    """
    unique = unique_providers(providers)
    choices = []
    for slot, request in requests.items():
        check_slot(slot)
        candidates = ask_all(request, unique)
        key = next((key for key in keys_of(slot, request) if key in user), None)
        if key is not None:
            chosen = by_user(slot, request, candidates, key, user[key], unique)
            source: Literal["user", "score", "reference"] = "user"
        else:
            chosen = _by_score(slot, request, candidates, fallback, backend_plugin, unique)
            source = "reference" if chosen.provider.fallback else "score"
        choices.append(record(slot, request, chosen, source, candidates, key))
    if fallback == "warn":
        _warn(choices)
    return tuple(choices)


def check_slot(slot: str) -> None:
    """Slots become attributes of the operator table."""
    if not slot.isidentifier() or iskeyword(slot) or slot.startswith("_"):
        raise PlanError(f"slot {slot!r}: must be an identifier that does not begin with an underscore")


def check_user_keys(user: Mapping[str, Sequence[str]], requests: Mapping[str, OpRequest]) -> None:
    """Refuse keys of the ``ops`` setting that match no slot of the whole plan.

    Raises:
        PlanError: naming the key and the nearest valid one.
    """
    known = {key for slot, request in requests.items() for key in keys_of(slot, request)}
    for key in user:
        if key not in known:
            raise PlanError(f"ops.{json.dumps(key)}: nothing in this plan is called that{suggest(key, known)}")


def keys_of(slot: str, request: OpRequest) -> list[str]:
    stage = [f"sampling.{request.stage}"] if isinstance(request, SamplingRequest) else []
    kind = f"{request.op}/{request.layer_kind}"
    return [slot, *stage, f"{kind}/{request.phase}", kind, request.op]


def unique_providers(providers: Iterable[tuple[str, Provider]]) -> dict[str, tuple[str, Provider]]:
    """``op plugin:provider`` -> provider. The same provider may be listed twice, two of one name may not."""
    unique: dict[str, tuple[str, Provider]] = {}
    for plugin, provider in providers:
        key = f"{provider.op} {plugin}:{provider.name}"
        if unique.setdefault(key, (plugin, provider)) != (plugin, provider):
            raise PlanError(f"plugin {plugin!r} has two providers named {provider.name!r} for {provider.op}")
    return unique


def ask_all(request: OpRequest, providers: Mapping[str, tuple[str, Provider]]) -> list[Offer]:
    return [
        _ask(request, plugin, provider)
        for plugin, provider in sorted(providers.values(), key=lambda item: (item[0], item[1].name))
        if provider.op == request.op
    ]


def _ask(request: OpRequest, plugin: str, provider: Provider) -> Offer:
    label = f"{plugin}:{provider.name}"
    lacking = sorted(request.demands - provider.caps)
    if lacking:
        return Offer(label, plugin, provider, None, f"lacks: {', '.join(lacking)}")
    try:
        verdict = provider.supports(request)
        bug = _bug(verdict)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        verdict, bug = Supports(None), f"supports() raised {cause_line(error)}"
    if bug:
        log.warning("provider_bug", provider=label, op=request.op, cause=bug)
        return Offer(label, plugin, provider, None, f"provider bug: {bug}")
    return Offer(label, plugin, provider, verdict.score, verdict.reason)


def _bug(verdict: object) -> str:
    if not isinstance(verdict, Supports):
        return f"supports() returned {verdict!r}, not yes(...) or no(...)"
    if verdict.score is None:
        return "" if verdict.reason else "supports() refused without a reason"
    if type(verdict.score) is not int or not 0 <= verdict.score <= MAX_SCORE:
        return f"score {verdict.score!r} is not an int of 0 to {MAX_SCORE}"
    return ""


def by_user(
    slot: str,
    request: OpRequest,
    candidates: list[Offer],
    key: str,
    names: Sequence[str],
    providers: Mapping[str, tuple[str, Provider]],
) -> Offer:
    where = f"ops.{json.dumps(key)}"
    known = {candidate.label for candidate in candidates} | {candidate.plugin for candidate in candidates}
    for name in names:
        if name not in known:
            elsewhere = sorted({p.op for plugin, p in providers.values() if name in (plugin, f"{plugin}:{p.name}")})
            hint = f" (it provides {', '.join(elsewhere)})" if elsewhere else ""
            raise PlanError(f"{where}: {name!r} provides no {request.op}{hint}{suggest(name, known)}")
    for name in names:
        named = [
            c
            for c in candidates
            if c.score is not None and (name == c.label or (name == c.plugin and not c.provider.on_request))
        ]
        if named:
            return top_of(slot, request, named, names[0])
    listed = [c for c in candidates if c.label in names or c.plugin in names]
    raise PlanError(f"slot {slot!r} ({request.op}): {where} = {json.dumps(list(names))} cannot be met: {_why(listed)}")


def _by_score(
    slot: str,
    request: OpRequest,
    candidates: list[Offer],
    fallback: FallbackPolicy,
    backend_plugin: str,
    providers: Mapping[str, tuple[str, Provider]],
) -> Offer:
    if not candidates:
        ops = {provider.op for _, provider in providers.values()}
        raise PlanError(f"slot {slot!r}: no loaded plugin provides {request.op!r}{suggest(request.op, ops)}")
    eligible = [c for c in candidates if c.score is not None and not c.provider.on_request]
    own = [c for c in eligible if not c.provider.fallback]
    if own:
        return top_of(slot, request, own, backend_plugin)
    if not eligible:
        raise PlanError(
            f"slot {slot!r} ({request.op}): no provider can serve it: {_why(candidates)}{_hint(request, candidates)}"
        )
    if fallback == "error":
        raise PlanError(
            f"slot {slot!r} ({request.op}): only a reference operator can serve it, and fallback is 'error': "
            f'{_why(candidates)}; to allow it, write: fallback = "warn"'
        )
    return top_of(slot, request, eligible, backend_plugin)


def top_of(slot: str, request: OpRequest, eligible: list[Offer], first: str) -> Offer:
    """The highest score. Equals are the user's to decide, never the order in which they were found."""
    top = max(c.score for c in eligible if c.score is not None)
    best = sorted((c for c in eligible if c.score == top), key=lambda c: (c.plugin != first, c.label))
    if len(best) > 1:
        lines = " or ".join(f"ops.{json.dumps(request.op)} = {json.dumps([c.label])}" for c in best)
        raise PlanError(f"slot {slot!r} ({request.op}): equal scores ({top}); write the one you want: {lines}")
    return best[0]


def _why(candidates: Iterable[Offer]) -> str:
    reasons = (
        c.reason
        if c.score is None
        else "only when named in full"
        if c.provider.on_request
        else f"eligible with score {c.score}"
        for c in candidates
    )
    return "; ".join(f"{c.label}: {reason}" for c, reason in zip(candidates, reasons, strict=True))


def _hint(request: OpRequest, candidates: Iterable[Offer]) -> str:
    return package_hint(request.demands - frozenset().union(*(c.provider.caps for c in candidates)))


def record(
    slot: str,
    request: OpRequest,
    chosen: Offer,
    source: Literal["user", "score", "reference"],
    candidates: list[Offer],
    key: str | None,
) -> Choice:
    if chosen.score is None:
        raise AssertionError(f"{chosen.label} was chosen without being eligible")
    losers = []
    for c in candidates:
        if c is chosen:
            continue
        reason = c.reason
        if c.score is not None:
            by = f"not preferred by ops.{json.dumps(key)}" if source == "user" else f"score {c.score} < {chosen.score}"
            reason = by if not c.provider.fallback or source == "user" else "reference: only a fallback"
            if c.provider.on_request:
                reason = f"only on request: ops.{json.dumps(request.op)} = {json.dumps([c.label])}"
        losers.append(Loser(provider=c.label, reason=reason, score=c.score))
    return Choice(
        slot=slot,
        op=request.op,
        request=request_to_data(request),
        provider=chosen.label,
        score=chosen.score,
        reason=chosen.reason,
        source=source,
        losers=tuple(losers),
        proofs={cap: test for cap, test in chosen.provider.proofs.items() if cap in request.demands},
    )


def _warn(choices: Iterable[Choice]) -> None:
    slots: dict[str, list[str]] = {}
    for choice in choices:
        if choice.source == "reference":
            slots.setdefault(choice.op, []).append(choice.slot)
    for op, names in sorted(slots.items()):
        log.warning("reference_fallback", op=op, slots=names)
