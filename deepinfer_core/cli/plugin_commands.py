"""Commands that plugins declare with ``deepinfer_commands``."""

from __future__ import annotations

import click

from deepinfer_core.api import PluginError
from deepinfer_core.config import load_config
from deepinfer_core.engine.logs import configure_logging
from deepinfer_core.plugins import Registry, claimed, load_plugins, resolve


def command_names() -> list[str]:
    """Of all commands that plugins have."""
    return list(claimed(_registry(), "command"))


def _registry() -> Registry:
    config = load_config()
    configure_logging(config.logging)
    plugins = config.plugins
    return load_plugins(plugins.allow, plugins.block, strict=plugins.strict, files=plugins.paths)


def find_command(name: str) -> click.Command | None:
    """The command that a plugin calls ``name``, or None.

    Raises:
        PluginError: two plugins have it, or the one that has it cannot be used.
    """
    registry = _registry()
    if name not in claimed(registry, "command"):
        return None
    plugin, info = resolve(registry, "command", name)
    try:
        command = info.command.load()
    except Exception as error:
        raise PluginError(
            f"command {name!r} of plugin {plugin!r} cannot be imported from {info.command.target}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(command, click.Command):
        raise PluginError(f"command {name!r} of plugin {plugin!r}: {info.command.target} is no click.Command")
    return command
