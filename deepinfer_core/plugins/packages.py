"""Which distribution to install for a demand that nothing here meets."""

from __future__ import annotations

from collections.abc import Iterable

PACKAGES = {"batch_invariant": "deepinfer-batch-invariance"}
"""Cap -> distribution whose operators declare it."""


def package_hint(unmet: Iterable[str]) -> str:
    """``"; demand ... : install ..."`` for the demands that no candidate meets, or nothing."""
    known = [f"{cap!r} is met by the package {PACKAGES[cap]}" for cap in sorted(unmet) if cap in PACKAGES]
    return "".join(f"; {text}" for text in known)
