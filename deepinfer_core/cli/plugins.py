"""``deepinfer plugins``: what is installed, from package metadata; with ``--load``, what works and what it does."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import attrs
import click

from deepinfer_core.api import API_VERSION, PluginError

from .options import EngineOptions, plugin_options
from .output import print_json, print_table

if TYPE_CHECKING:
    from deepinfer_core.config import PluginsConfig
    from deepinfer_core.plugins import Candidate, Failure, Registry

_STATUS = {"stale": "stale", "duplicate": "shadowed", "version": "skipped"}
"""Status by the stage at which a plugin was dropped; any other stage is ``failed``."""

_COLUMNS = ("name", "distribution", "version", "status", "api", "path", "note")


@attrs.frozen(kw_only=True)
class PluginRow:
    """One line. ``status``: ok, skipped, stale, shadowed or failed; ``note`` says why, if it is not ok.

    ``path`` is set where the plugin is not a regular install: its metadata folder or file. ``hooks``, ``commands``
    and ``settings`` are known once it is loaded.
    """

    name: str
    distribution: str
    version: str
    status: str
    api: str = ""
    path: str = ""
    note: str = ""
    hooks: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


@click.command()
@click.option("--load", is_flag=True, help="Load them too: shows hooks, commands, settings and what fails.")
@click.option("--json", "as_json", is_flag=True, help="A JSON array.")
@plugin_options
def plugins(options: EngineOptions, load: bool, as_json: bool) -> None:
    """List installed plugins, and why one is not used.

    Reads package metadata only, unless --load is given.
    """
    config = options.load()
    problem: PluginError | None = None
    if load:
        rows = _loaded(config)
    else:
        rows, problem = _installed(config.plugins)
    if as_json:
        print_json([{"api_of_core": _dotted(API_VERSION), **attrs.asdict(row)} for row in rows])
    else:
        print_table("plugins", _COLUMNS, [[getattr(row, column) for column in _COLUMNS] for row in rows])
        if load:
            _print_details(rows)
    if problem is not None:
        raise problem


def _installed(config: PluginsConfig) -> tuple[list[PluginRow], PluginError | None]:
    """Rows from metadata, and what is wrong with the choice of plugins, if anything is."""
    from deepinfer_core.plugins.discovery import discover
    from deepinfer_core.plugins.selection import select

    discovery = discover()
    problem = None
    try:
        selection = select(discovery, config.allow, config.block, {})
        chosen, failures = selection.chosen, selection.failures
    except PluginError as error:
        problem, chosen, failures = error, discovery.candidates, discovery.failures
    dropped = {(failure.name, failure.distribution) for failure in failures}
    rows = [_candidate(candidate, used=candidate in chosen) for candidate in discovery.candidates
            if (candidate.name, candidate.distribution) not in dropped]  # fmt: skip
    return _sorted([*rows, *map(_failed, failures)]), problem


def _loaded(config: Any) -> list[PluginRow]:
    """Rows after loading. Checks the environment and the plugins' settings as an engine would."""
    from deepinfer_core.config import check_environment, check_plugin_tables, plugin_settings
    from deepinfer_core.plugins import claimed, load_plugins

    registry = load_plugins(config.plugins.allow, config.plugins.block, files=config.plugins.paths)
    declared = {name: plugin.info.settings for name, plugin in registry.plugins.items() if plugin.info.settings}
    check_environment(os.environ, declared)
    check_plugin_tables(config, list(declared))
    for name, settings in declared.items():
        plugin_settings(config, name, settings)
    commands = claimed(registry, "command")
    found, _ = _installed(config.plugins)
    known = {(row.name, row.distribution): row for row in found}
    for name, plugin in registry.plugins.items():
        at = (name, plugin.record.distribution)
        row = known.get(at) or PluginRow(
            name=name, distribution=at[1], version=plugin.record.version, status="ok", path=plugin.path
        )
        known[at] = attrs.evolve(
            row,
            api=_dotted(plugin.info.api),
            note=row.note or plugin.info.help,
            hooks=_hooks(registry, name),
            commands=tuple(command for command, holders in commands.items() if name in dict(holders)),
            settings=_field_names(declared[name]) if name in declared else (),
        )
    for failure in registry.failures:
        known[failure.name, failure.distribution] = _failed(failure)
    return _sorted(list(known.values()))


def _candidate(candidate: Candidate, *, used: bool) -> PluginRow:
    note = "" if used else "blocked, or not in plugins.allow"
    if used and candidate.duplicates:
        note = f"other metadata of it was ignored: {', '.join(candidate.duplicates)}"
    return PluginRow(
        name=candidate.name,
        distribution=candidate.distribution,
        version=candidate.version,
        status="ok" if used else "skipped",
        api=f"{API_VERSION[0]}.x",
        path=candidate.path if candidate.editable else "",
        note=note,
    )


def _failed(failure: Failure) -> PluginRow:
    return PluginRow(
        name=failure.name,
        distribution=failure.distribution,
        version=failure.version,
        status=_STATUS.get(failure.stage, "failed"),
        path=failure.path,
        note=failure.cause,
    )


def _hooks(registry: Registry, name: str) -> tuple[str, ...]:
    hooks = [hook for hook in vars(registry.manager.hook) if hook.startswith("deepinfer_")]
    return tuple(sorted(hook for hook in hooks if name in registry.implementers(hook)))


def _field_names(settings: type) -> tuple[str, ...]:
    return tuple(field.name for field in attrs.fields(settings))


def _print_details(rows: list[PluginRow]) -> None:
    for row in rows:
        if row.hooks:
            click.echo(f"\n{row.name}")
            click.echo(f"  hooks: {', '.join(hook.removeprefix('deepinfer_') for hook in row.hooks)}")
        if row.commands:
            click.echo(f"  commands: {', '.join(row.commands)}")
        if row.settings:
            click.echo(f"  settings: {', '.join(row.settings)}")


def _sorted(rows: list[PluginRow]) -> list[PluginRow]:
    return sorted(rows, key=lambda row: (row.name, row.distribution))


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
