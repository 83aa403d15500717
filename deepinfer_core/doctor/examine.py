"""The examination: settings, metadata, then every plugin and every backend in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from deepinfer_core.api import DeviceError, PluginError
from deepinfer_core.plugins import Candidate, Failure, discover
from deepinfer_core.plugins.discovery import PATH_DISTRIBUTION
from deepinfer_core.plugins.nearest import suggest
from deepinfer_core.plugins.selection import select

from .ask_child import ask
from .backends import Home, backend_findings
from .finding import Diagnosis, Examined, Finding
from .plugin_facts import declared_findings, stopped
from .requirements import requirement_findings
from .settings import given_settings, plugin_setting_findings

TIMEOUT = 60.0
"""Seconds for one child. Importing torch takes some of them on a cold disk."""

_REMOVABLE = {"stale", "version", "duplicate"}


def examine(
    *,
    backend: str | None = None,
    timeout: float = TIMEOUT,
    file: str | None = None,
    environ: Mapping[str, str] = os.environ,
    progress: Callable[[str], None] = lambda _: None,
) -> Diagnosis:
    """Look at everything that is installed or named by ``plugins.paths``, or at one backend and its plugin.

    Args:
        backend: as after ``--accelerator``; None: all. A backend that is asked for must have its device.
        timeout: seconds for each child process.
        file: configuration file. environ: environment, for settings and for the children.
        progress: called with what is looked at next.

    Raises:
        DeviceError: no plugin that answered knows ``backend``.
    """
    given, findings = given_settings(environ, file)
    config = given.load()
    installed, more = _selected(config.plugins.allow, config.plugins.block)
    findings += more
    candidates: list[Candidate] = []
    answers: dict[str, Mapping[str, Any]] = {}
    plugins: list[Examined] = []
    about: dict[str, list[Finding]] = {}
    for candidate in (*installed, *map(_by_path, config.plugins.paths)):
        progress(f"plugin {candidate.name}")
        question = {
            "job": "declare",
            "name": candidate.name,
            "pin": None if candidate.by_path else candidate.name if candidate.builtin else candidate.pin,
            "entry_point": candidate.entry_point,
            "file": given.file,
        }
        answer = ask(question, timeout=timeout, environ=given.environ)
        if candidate.by_path and not answer.trouble:
            candidate = attrs.evolve(candidate, name=answer.facts["name"])
        candidates.append(candidate)
        found = [] if candidate.by_path else requirement_findings(candidate)
        if answer.trouble:
            found.append(stopped(candidate, answer))
        else:
            answers[candidate.name] = answer.facts
            found += declared_findings(candidate, answer.facts, asked=backend)
            plugins.append(_examined(candidate, answer.facts))
        about[candidate.name] = about.get(candidate.name, []) + found
    if len(answers) == len(candidates):  # the settings of a plugin that did not answer are not known
        findings += plugin_setting_findings(given, {name: facts["settings"] for name, facts in answers.items()})
    usable = given.without([*findings, *(finding for found in about.values() for finding in found)])
    homes = _homes(candidates, answers)
    wanted = _wanted(backend, homes, answers, findings, about)
    started = []
    for name in wanted:
        if name in homes:
            progress(f"backend {name}")
            answer = ask(
                {"job": "start", "backend": name, "file": usable.file}, timeout=timeout, environ=usable.environ
            )
            plan, found = backend_findings(name, homes[name], answer)
            started.append((name, plan))
            about[homes[name].candidate.name] += found
    shown = about if backend is None else {n: f for n, f in about.items() if _concerns(n, backend, answers)}
    return Diagnosis(
        plugins=tuple(plugin for plugin in plugins if plugin.name in shown),
        backends=tuple(started),
        findings=(*findings, *(finding for found in shown.values() for finding in found)),
    )


def _selected(allow: Any, block: Any) -> tuple[tuple[Candidate, ...], list[Finding]]:
    discovery = discover()
    try:
        selection = select(discovery, allow, block, {})
    except PluginError as error:
        fix = "deepinfer plugins"
        broken = Finding(plugin="", check="selection", severity="error", text=str(error), fix=fix)
        return discovery.candidates, [broken, *map(_not_loaded, discovery.failures)]
    return selection.chosen, [_not_loaded(failure) for failure in selection.failures]


def _by_path(item: str) -> Candidate:
    """An item of ``plugins.paths``, under a name for as long as its own is not known."""
    name = Path(item).stem if item.endswith(".py") else item.rpartition(".")[2]
    return Candidate(name=name, distribution=PATH_DISTRIBUTION, version="", entry_point=item, path=item)


def _not_loaded(failure: Failure) -> Finding:
    fix = f"pip uninstall {failure.distribution}" if failure.stage in _REMOVABLE else "deepinfer plugins --load"
    return Finding(plugin=failure.name, check=failure.stage, severity="error", text=str(failure), fix=fix)


def _examined(candidate: Candidate, facts: Mapping[str, Any]) -> Examined:
    return Examined(
        name=candidate.name,
        distribution=candidate.distribution,
        version=candidate.version,
        import_seconds=facts["import_seconds"],
        hook_seconds=facts["hook_seconds"],
        hooks=facts["hooks"],
        devices=tuple(f"{d['backend']} ({d['arch']}, {d['evidence']})" for d in facts["devices"]),
    )


def _homes(candidates: Iterable[Candidate], answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Home]:
    """Backends with a device, by name."""
    return {
        device["backend"]: Home(candidate, device["type"])
        for candidate in candidates
        if candidate.name in answers
        for device in answers[candidate.name]["devices"]
    }


def _wanted(
    backend: str | None,
    homes: Mapping[str, Home],
    answers: Mapping[str, Mapping[str, Any]],
    findings: Iterable[Finding],
    about: Mapping[str, list[Finding]],
) -> list[str]:
    if backend is None:
        return sorted(homes)
    absent = {item["backend"] for facts in answers.values() for item in facts["absent"]}
    named = (*findings, *about.get(backend, ()))  # also of what was not even loaded
    broken = any(finding.plugin == backend and finding.severity == "error" for finding in named)
    if backend not in homes and backend not in absent and not broken:
        known = sorted({*homes, *absent})
        raise DeviceError(f"--backend {backend!r}: no plugin has it{suggest(backend, known)}")
    return [backend]


def _concerns(plugin: str, backend: str, answers: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a plugin has, or might have had, the backend."""
    facts = answers.get(plugin, {"devices": [], "absent": []})
    return plugin == backend or any(item["backend"] == backend for item in (*facts["devices"], *facts["absent"]))
