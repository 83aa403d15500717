"""What an examination yields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs

Severity = Literal["error", "warning", "note"]
"""``error``: something that was asked for cannot work. ``warning``: it works, at a cost or by chance. ``note``: good to
know, such as a backend without its device."""


@attrs.frozen(kw_only=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        plugin: whom it is about; ``""``: the installation as a whole.
        check: which question found it (``import cost``, ``torch build``, ...).
        text: what was found, one line. fix: the command that mends it, or shows the way.
    """

    plugin: str
    check: str
    severity: Severity
    text: str
    fix: str


@attrs.frozen(kw_only=True)
class Examined:
    """A plugin that answered. Times are seconds of processor time in its own process, interpreter and core apart.

    ``devices``: ``backend (arch, evidence)`` of each it found; ``hooks``: how many it implements.
    """

    name: str
    distribution: str
    version: str
    import_seconds: float
    hook_seconds: float
    hooks: int
    devices: tuple[str, ...]


@attrs.frozen(kw_only=True)
class Diagnosis:
    """Everything that was seen. ``backends``: those that were started, with how a small plan came out on them."""

    plugins: tuple[Examined, ...]
    backends: tuple[tuple[str, str], ...]
    findings: tuple[Finding, ...]

    def worst(self) -> Severity | None:
        """The gravest severity among the findings, or None."""
        order: Sequence[Severity] = ("error", "warning", "note")
        found = {finding.severity for finding in self.findings}
        return next((severity for severity in order if severity in found), None)
