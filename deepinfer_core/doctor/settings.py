"""Settings that nobody reads: in the environment and in the configuration file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from deepinfer_core.api import ConfigError
from deepinfer_core.config import EngineConfig, check_environment, check_plugin_tables, load_config
from deepinfer_core.config.settings import ENV_PREFIX, FILE_VARIABLE

from .finding import Finding


@attrs.frozen(kw_only=True)
class Settings:
    """What is right in the environment and the file, for the children: their questions are about other things.

    ``file`` is ``os.devnull`` when the file has a mistake; None when there is none.
    """

    environ: Mapping[str, str]
    file: str | None

    def load(self) -> EngineConfig:
        return load_config(environ=self.environ, file=self.file)

    def without(self, findings: Sequence[Finding]) -> Settings:
        """Without the variables and the file that findings are about."""
        bad = {finding.fix.removeprefix("unset ") for finding in findings if finding.fix.startswith("unset ")}
        file = os.devnull if any(finding.check == "configuration" for finding in findings) else self.file
        return Settings(environ={name: value for name, value in self.environ.items() if name not in bad}, file=file)


def given_settings(environ: Mapping[str, str], file: str | None) -> tuple[Settings, list[Finding]]:
    """What is usable of an environment and a file, and one finding for each thing that is not.

    Each variable is judged alone, so that one mistake does not hide the next.
    """
    named = file or environ.get(FILE_VARIABLE) or None
    findings = []
    for name in _ours(environ):
        try:
            load_config(environ={name: environ[name]}, file=os.devnull)
        except ConfigError as error:
            findings.append(_unset(name, error))
    given = Settings(environ=environ, file=named).without(findings)
    try:
        given.load()
    except ConfigError as error:
        findings.append(_edit(named, error) if named else _compare(error))
        given = Settings(environ=given.environ, file=os.devnull)
    return given, findings


def plugin_setting_findings(given: Settings, fields: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Variables and tables that name no setting of a plugin that answered.

    Args:
        fields: plugin -> names of its settings.
    """
    declared: dict[str, type[Any]] = {
        name: attrs.make_class("Settings", {field: attrs.field(default=None) for field in own})
        for name, own in fields.items()
        if own
    }
    findings = []
    for name in _ours(given.environ):
        try:
            check_environment({name: given.environ[name]}, declared)
        except ConfigError as error:
            findings.append(_unset(name, error))
    try:
        check_plugin_tables(given.without(findings).load(), list(declared))
    except ConfigError as error:
        findings.append(_edit(given.file, error) if given.file else _compare(error))
    return findings


def _ours(environ: Mapping[str, str]) -> list[str]:
    return sorted(name for name in environ if name.startswith(ENV_PREFIX) and name != FILE_VARIABLE)


def _unset(name: str, error: ConfigError) -> Finding:
    return Finding(plugin="", check="environment", severity="error", text=str(error), fix=f"unset {name}")


def _edit(file: str | None, error: ConfigError) -> Finding:
    fix = f'"${{EDITOR:-vi}}" {file}'
    return Finding(plugin="", check="configuration", severity="error", text=str(error), fix=fix)


def _compare(error: ConfigError) -> Finding:
    """Two variables that are right alone and not together."""
    fix = f"env | grep {ENV_PREFIX}"
    return Finding(plugin="", check="configuration", severity="error", text=str(error), fix=fix)
