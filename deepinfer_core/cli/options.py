"""Options that commands share, and the configuration they add up to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import click

if TYPE_CHECKING:
    from deepinfer_core.config import EngineConfig


@attrs.frozen(kw_only=True)
class EngineOptions:
    """What the user gave of the shared options; None or empty where nothing was given."""

    model: str | None = None
    accelerator: str | None = None
    dtype: str | None = None
    log_level: str | None = None
    config_file: str | None = None
    sets: Sequence[str] = ()
    no_plugin: Sequence[str] = ()
    record_trace: str | None = None

    def load(self) -> EngineConfig:
        """The configuration from all sources. An option of its own wins over ``--set``."""
        from deepinfer_core.config import load_config, override
        from deepinfer_core.engine.logs import configure_logging

        config = load_config(file=self.config_file, sets=self.sets)
        block = (*config.plugins.block, *self.no_plugin) if self.no_plugin else None
        for option, path, value in (
            ("--model", "model.path", self.model),
            ("--accelerator", "accelerator", self.accelerator),
            ("--dtype", "model.dtype", self.dtype),
            ("--log-level", "logging.level", self.log_level),
            ("--no-plugin", "plugins.block", block),
            ("--record-trace", "logging.trace_file", self.record_trace),
        ):
            if value is not None:
                config = override(config, {path: value}, source=option)
        configure_logging(config.logging)
        return config


_ENGINE = (
    click.option(
        "--model", metavar="PATH", help="Checkpoint directory, GGUF file, 'demo', or a package's name for one."
    ),
    click.option("--accelerator", metavar="NAME", help="Backend to run on; 'auto' takes the best one present."),
    click.option("--dtype", metavar="NAME", help="auto, float32, bfloat16 or float16."),
)
_SHARED = (
    click.option("--config", "config_file", metavar="FILE", help="TOML file with settings."),
    click.option("--set", "sets", metavar="KEY=VALUE", multiple=True, help="One setting; may be repeated."),
    click.option("--no-plugin", metavar="NAME", multiple=True, help="Do not load this plugin; may be repeated."),
    click.option("--log-level", metavar="LEVEL", help="debug, info, warning or error."),
)
_RECORD = click.option("--record-trace", metavar="FILE", help="Record arrivals and steps, for replay.")


def engine_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds all shared options; the command gets them as its first argument, an :class:`EngineOptions`."""
    return _add((*_ENGINE, *_SHARED), function)


def run_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """As :func:`engine_options`, for commands that run a model."""
    return _add((*_ENGINE, *_SHARED, _RECORD), function)


def plugin_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """As :func:`engine_options`, without those that choose a model and where it runs."""
    return _add(_SHARED, function)


def _add(options: Sequence[Callable[..., Any]], function: Callable[..., Any]) -> Callable[..., Any]:
    names = [field.name for field in attrs.fields(EngineOptions)]

    @functools.wraps(function)
    def command(**values: Any) -> Any:
        given = {name: values.pop(name) for name in names if name in values}
        return function(EngineOptions(**given), **values)

    for option in reversed(options):
        command = option(command)
    return command
