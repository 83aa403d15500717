"""Declares the compilers of structured output."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_core.api import ConstraintInfo, LazyRef, PluginInfo, hookimpl

from .settings import GrammarSettings

_COMPILER = "deepinfer_structured_output.compiler"


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(
        name="structured_output",
        api=(1, 1),
        help="JSON Schema, regular expressions, EBNF, choices and tool-call tags",
        settings=GrammarSettings,
    )


@hookimpl
def deepinfer_constraints() -> Sequence[ConstraintInfo]:
    return [
        ConstraintInfo(
            name="routed",
            help="for each grammar the library that is known to enforce all of it",
            factory=LazyRef(f"{_COMPILER}:routed"),
        ),
        ConstraintInfo(
            name="llguidance",
            help="llguidance alone; what it is not known to enforce is refused",
            factory=LazyRef(f"{_COMPILER}:only_llguidance"),
            priority=50,
        ),
        ConstraintInfo(
            name="xgrammar",
            help="xgrammar alone; what it is not known to enforce is refused",
            factory=LazyRef(f"{_COMPILER}:only_xgrammar"),
            priority=40,
        ),
    ]
