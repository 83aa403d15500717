"""Which minor of the interface brought which names, so that a plugin's declared range can be checked."""

from __future__ import annotations

from collections.abc import Mapping

ADDED: Mapping[tuple[int, int], frozenset[str]] = {}
"""Minor -> the public names of ``deepinfer_core.api`` that it added. Everything else came with 1.0."""


def added_in(name: str) -> tuple[int, int]:
    """The interface version that brought a public name."""
    return next((minor for minor, names in ADDED.items() if name in names), (1, 0))
