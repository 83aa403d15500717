"""What a distribution says it needs, against what is installed: read from metadata."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement

from deepinfer_core import __version__
from deepinfer_core.plugins.discovery import CORE_DISTRIBUTION, Candidate

from .finding import Finding


def requirement_findings(candidate: Candidate) -> list[Finding]:
    """Requirements of the candidate's distribution that this environment does not meet. Extras are not asked about."""
    try:
        lines = metadata.requires(candidate.distribution) or []
    except metadata.PackageNotFoundError:  # the core, run from a source tree
        return []
    findings = []
    for line in lines:
        try:
            need = Requirement(line)
        except InvalidRequirement:
            continue
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        installed = _installed(need.name)
        if installed is not None and need.specifier.contains(installed, prereleases=True):
            continue
        wanted = f"{need.name}{need.specifier}"
        findings.append(
            Finding(
                plugin=candidate.name,
                check="torch build" if need.name == "torch" else "requirements",
                severity="error",
                text=f"{candidate.distribution} needs {wanted}; installed: {installed or 'none'}",
                fix=f"pip install '{wanted}'",
            )
        )
    return findings


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return __version__ if name == CORE_DISTRIBUTION else None
