"""Operators with one mistake each, for the tests that the kit bites.

A mutant replaces the provider of one operator on the host: ``build(request, reference)`` gives the broken operator,
``reference`` the right one. The test names the case that must fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs

from deepinfer_core.api import Provider, Supports, yes
from deepinfer_core.conformance.target import Target, open_target

CAPS = frozenset({"deterministic", "spec_verify", "device_state", "kv_layout:paged"})

Build = Callable[[Any, Any], Any]
"""``(request, the right operator) -> the broken one``. ``right.again(field=value)``: a right one of another request."""


class Wrapped:
    """An operator with some methods replaced."""

    def __init__(self, right: Any, **methods: Callable[..., Any]) -> None:
        self._right = right
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._right, name)


@attrs.frozen(kw_only=True)
class Mutant:
    """A mistake.

    Attributes:
        op: the operator it is in. case: the case that must fail. says: a part of the message.
        build: makes it; see the module.
        caps: what the provider claims beside the usual.
        supports: its verdict. fallback: of the backend. device: changes to the device.
    """

    op: str
    case: str
    build: Build
    says: str = ""
    caps: frozenset[str] = frozenset()
    supports: Callable[[Any], Supports] = attrs.field(default=lambda _: yes(100))
    fallback: str = "allow"
    device: Callable[[Any], Any] | None = None


MUTANTS: dict[str, Mutant] = {}


def mutant(op: str, case: str, says: str = "", caps: tuple[str, ...] = (), **more: Any) -> Callable[[Build], Build]:
    """Register the decorated function, by its name."""

    def register(build: Build) -> Build:
        name = build.__name__
        assert name not in MUTANTS
        MUTANTS[name] = Mutant(op=op, case=case, says=says, build=build, caps=frozenset(caps), **more)
        return build

    return register


@contextmanager
def broken_target(mutant: Mutant) -> Iterator[Target]:
    """The reference backend with one provider more, which wins for the mutant's operator."""
    target = open_target("reference")

    def build(request: Any, context: Any) -> Any:
        def again(**changes: Any) -> Any:
            return context.reference(attrs.evolve(request, demands=request.demands & CAPS, **changes))

        return mutant.build(request, Wrapped(again(), again=again))

    provider = Provider(
        name=_name(mutant), op=mutant.op, build=build, caps=CAPS | mutant.caps, supports=mutant.supports
    )
    changes: Mapping[str, Any] = {
        "providers": [("broken", provider), *target.providers],
        "plugin": "broken",
        "fallback": mutant.fallback,
    }
    device = target.device if mutant.device is None else mutant.device(target.device)
    changed = attrs.evolve(target, **changes, device=device)
    try:
        yield changed
    finally:
        changed.close()
        target.close()


def _name(mutant: Mutant) -> str:
    # A layout's name is what its caches are called.
    return "paged" if mutant.op.startswith("kv_layout.") else "mistaken"
