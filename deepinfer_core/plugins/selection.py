"""Which of the installed plugins to load: the allowlist, the blocklist, and ``name@distribution`` pins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs
from packaging.utils import canonicalize_name

from deepinfer_core.api import PluginError

from .discovery import Candidate, Discovery
from .failure import Failure
from .nearest import suggest

_ALLOW, _BLOCK = "plugins.allow (DEEPINFER_PLUGINS)", "plugins.block (--no-plugin)"


@attrs.frozen
class Selection:
    """Candidates to load, by name; failures to report; names whose failure is an error."""

    chosen: tuple[Candidate, ...]
    failures: tuple[Failure, ...]
    asked: frozenset[str]


@attrs.frozen
class _Selector:
    """``name`` or ``name@distribution``."""

    name: str
    distribution: str
    origin: str

    def matches(self, candidate: Candidate) -> bool:
        here = canonicalize_name(candidate.distribution)
        return self.name == candidate.name and self.distribution in ("", here)


def select(
    discovery: Discovery,
    allow: Sequence[str] | None,
    block: Sequence[str],
    requested: Mapping[str, str],
) -> Selection:
    """Decide what loads.

    Args:
        allow: None allows every installed plugin; otherwise these and the core's own, so an empty list means
            no strangers. Naming a plugin here asks for it.
        block: never loaded, the core's own included. Wins over ``allow``.
        requested: asked for elsewhere in the configuration (an operator list, a policy) -> which setting does.

    Raises:
        PluginError: a name that is not installed, a plugin asked for that is broken, blocked or ambiguous.
    """
    allowed = _parse(allow or (), _ALLOW, discovery)
    blocks = _parse(block, _BLOCK, discovery)
    requests = [s for name, origin in requested.items() for s in _parse([name], origin, discovery)]
    pins = _pins([*allowed, *requests])
    blocked = {s.name for s in blocks if not s.distribution}
    names = None if allow is None else {s.name for s in allowed}
    asked = frozenset({s.name for s in requests} | {s.name for s in allowed if s.name not in blocked})

    by_name: dict[str, list[Candidate]] = {}
    for candidate in discovery.candidates:
        if names is not None and not candidate.builtin and candidate.name not in names:
            continue
        if any(s.matches(candidate) for s in blocks):
            continue
        if canonicalize_name(candidate.distribution) == pins.get(
            candidate.name, canonicalize_name(candidate.distribution)
        ):
            by_name.setdefault(candidate.name, []).append(candidate)

    failures = [f for f in discovery.failures if f.name not in blocked and (names is None or f.name in names)]
    chosen: list[Candidate] = []
    for same in by_name.values():
        winner, duplicates = _unambiguous(same)
        chosen += winner
        failures += duplicates
    _check_requests(requests, asked, names, blocked, chosen, failures)
    return Selection(tuple(chosen), tuple(failures), asked)


def _parse(texts: Iterable[str], origin: str, discovery: Discovery) -> list[_Selector]:
    selectors = []
    for text in texts:
        name, _, distribution = text.strip().partition("@")
        homes = {c.distribution for c in discovery.candidates if c.name == name}
        homes |= {f.distribution for f in discovery.failures if f.name == name}
        if not homes:
            known = {c.name for c in discovery.candidates} | {f.name for f in discovery.failures}
            raise PluginError(f"{origin}: no plugin named {name!r} is installed{suggest(name, known)}")
        if distribution and canonicalize_name(distribution) not in {canonicalize_name(home) for home in homes}:
            raise PluginError(f"{origin}: {text!r}: plugin {name!r} comes from {', '.join(sorted(homes))}")
        selectors.append(_Selector(name, canonicalize_name(distribution) if distribution else "", origin))
    return selectors


def _pins(selectors: Iterable[_Selector]) -> dict[str, str]:
    pins: dict[str, str] = {}
    for selector in selectors:
        if selector.distribution and pins.setdefault(selector.name, selector.distribution) != selector.distribution:
            raise PluginError(
                f"plugin {selector.name!r} is pinned both to {pins[selector.name]} and to {selector.distribution}; "
                "keep one"
            )
    return pins


def _unambiguous(same: list[Candidate]) -> tuple[list[Candidate], list[Failure]]:
    """The one candidate of a name. Names of the core's own plugins are reserved; other doubles refuse all."""
    if len(same) == 1:
        return same, []
    winner = [candidate for candidate in same if candidate.builtin]
    homes = " and ".join(sorted(c.distribution for c in same))
    return winner, [
        Failure(
            name=c.name,
            distribution=c.distribution,
            version=c.version,
            path=c.path,
            stage="duplicate",
            cause=f"{homes} both provide a plugin {c.name!r}; write {c.pin} in DEEPINFER_PLUGINS to pick this one",
        )
        for c in same
        if c not in winner
    ]


def _check_requests(
    requests: list[_Selector],
    asked: frozenset[str],
    names: set[str] | None,
    blocked: set[str],
    chosen: list[Candidate],
    failures: list[Failure],
) -> None:
    loading = {candidate.name for candidate in chosen}
    for name in sorted(asked - loading):
        reasons = [str(failure) for failure in failures if failure.name == name]
        if reasons:
            raise PluginError("; ".join(reasons))
        if name in blocked:
            raise PluginError(f"plugin {name!r} is asked for and also blocked by --no-plugin; drop one of the two")
        if names is not None and name not in names:
            raise PluginError(f"plugin {name!r} is asked for but not listed in DEEPINFER_PLUGINS; add it there")
        raise PluginError(f"plugin {name!r} is asked for, but every distribution of it is blocked or pinned away")
