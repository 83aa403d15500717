"""From what a plugin did in its process to findings."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from deepinfer_core.plugins import Candidate

from .ask_child import Answer
from .finding import Finding, Severity

SLOW_SECONDS = 0.5
"""Processor time that importing a plugin and asking its hooks may take: every ``deepinfer`` command pays it."""


def stopped(candidate: Candidate, answer: Answer) -> Finding:
    """The child did not come to an end."""
    return Finding(
        plugin=candidate.name,
        check=answer.stage,
        severity="error",
        text=f"{candidate.entry_point}: {answer.trouble}, at stage {answer.stage!r}",
        fix=pip(candidate, "uninstall"),
    )


def pip(candidate: Candidate, command: str) -> str:
    """``pip`` for what is installed; what is not shows what is wrong when it is imported."""
    return f"python {_importing(candidate)}" if candidate.by_path else f"pip {command} {candidate.distribution}"


def _importing(candidate: Candidate) -> str:
    """What makes ``python`` import a plugin."""
    module = candidate.entry_point.partition(":")[0]
    return shlex.quote(module) if candidate.by_path and module.endswith(".py") else f"-c 'import {module}'"


def declared_findings(candidate: Candidate, facts: Mapping[str, Any], *, asked: str | None) -> list[Finding]:
    """What a plugin's declarations show. ``asked``: backend that must have its device."""
    trace = f"python -X importtime {_importing(candidate)}"
    findings: list[Finding] = []

    def found(check: str, severity: Severity, text: str, fix: str) -> None:
        findings.append(Finding(plugin=candidate.name, check=check, severity=severity, text=text, fix=fix))

    if facts["failure"]:
        found("load", "error", facts["failure"], _reinstall(candidate))
    if facts["heavy"]:
        text = f"importing it and asking its hooks imports {', '.join(facts['heavy'])}; import it where it is used"
        found("heavy imports", "warning", text, trace)
    # The libraries of a heavy package are its own; a device is not.
    opened = [name for name in facts["opened"] if not facts["heavy"] or name.startswith("/dev/")]
    if opened:
        text = f"importing it and asking its hooks opens {', '.join(opened)}; a probe only looks"
        found("device touched", "warning", text, f"strace -f -e trace=openat python {_importing(candidate)}")
    seconds = facts["import_seconds"] + facts["hook_seconds"]
    if seconds > SLOW_SECONDS and not facts["heavy"]:
        text = f"importing it and asking its hooks takes {seconds:.1f} s of processor time"
        found("import cost", "warning", text, trace)
    for cause in facts["hook_failures"]:
        found("hooks", "error", cause, "deepinfer plugins --load --log-level debug")
    for variable, cause in facts["bad_settings"]:
        found("settings", "error", cause, f"unset {variable}" if variable else "deepinfer explain")
    for item in facts["absent"]:
        severity: Severity = "error" if item["backend"] == asked else "note"
        found("driver", severity, f"no device for backend {item['backend']!r}: {item['reason']}", item["fix"])
    for device in facts["devices"]:
        archs = facts["archs"]
        if archs and device["arch"] not in archs:
            text = f"{device['backend']} is {device['arch']!r}; this package was built for {', '.join(archs)}"
            found("architecture", "error", text, pip(candidate, "install --upgrade"))
    return findings


def _reinstall(candidate: Candidate) -> str:
    if candidate.builtin or candidate.editable:
        return f"python {_importing(candidate)}"
    return pip(candidate, "install --force-reinstall")
