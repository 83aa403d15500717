"""From what happened when a backend was started to findings."""

from __future__ import annotations

import attrs

from deepinfer_core.plugins import Candidate

from .ask_child import Answer
from .finding import Finding, Severity
from .plugin_facts import pip


@attrs.frozen
class Home:
    """Where a backend comes from, and the torch type of its device."""

    candidate: Candidate
    type: str


def backend_findings(backend: str, home: Home, answer: Answer) -> tuple[str, list[Finding]]:
    """How a small plan came out, in words, and what is wrong."""
    findings: list[Finding] = []

    def found(check: str, severity: Severity, text: str, fix: str) -> None:
        findings.append(Finding(plugin=home.candidate.name, check=check, severity=severity, text=text, fix=fix))

    if answer.trouble:
        text = f"starting backend {backend!r}: {answer.trouble}, at stage {answer.stage!r}"
        fix = "pip install torch" if "No module named 'torch'" in answer.trouble else _conformance(backend)
        found("torch build" if fix == "pip install torch" else answer.stage, "error", text, fix)
        return "failed", findings
    for check, cause in answer.facts["problems"]:
        found(check, "error", _where(check, answer, backend, home) + cause, _fix(check, cause, backend, home))
    explain = f"deepinfer explain --accelerator {backend} --model demo --why"
    for text in answer.facts["misspelt"]:
        found("names", "warning", f"backend {backend!r}: {text}", explain)
    borrowed = answer.facts["reference"]
    if borrowed and not home.candidate.builtin:
        found("plan", "note", f"backend {backend!r} runs on reference operators for {', '.join(borrowed)}", explain)
    return answer.facts["plan"] or "failed", findings


def _where(check: str, answer: Answer, backend: str, home: Home) -> str:
    if check == "torch build":
        return f"torch {answer.facts['torch']} cannot use device type {home.type!r} of backend {backend!r}: "
    return f"backend {backend!r}: " if check != "plan" else f"a plan for backend {backend!r}: "


def _fix(check: str, cause: str, backend: str, home: Home) -> str:
    if check == "torch build":
        also = "" if home.candidate.by_path else f"{home.candidate.distribution} "
        return f"pip install --upgrade {also}torch"
    if check == "operators":
        return pip(home.candidate, "install --force-reinstall")
    if check == "plan" and "fallback is 'error'" in cause:
        return "export DEEPINFER_FALLBACK=warn"
    if check in ("plugins", "device"):
        return f"deepinfer explain --accelerator {backend} --log-level debug"
    return _conformance(backend)


def _conformance(backend: str) -> str:
    return f"deepinfer conformance {backend} --tier boots"
