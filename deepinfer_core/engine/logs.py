"""Structured logging to standard error, as configured."""

from __future__ import annotations

import logging
import sys

import structlog

from deepinfer_core.config import LoggingConfig


def _to_stderr(*_: object) -> structlog.WriteLogger:
    """Whatever standard error is by then. Also tells the engine's own configuration from an application's."""
    return structlog.WriteLogger(sys.stderr)


def configure_logging(config: LoggingConfig) -> None:
    """Apply ``logging.level`` and ``logging.format``, unless the application configured structlog itself.

    Logging is the process's: the engine made last decides.
    """
    if structlog.is_configured() and structlog.get_config()["logger_factory"] is not _to_stderr:
        return
    renderer = (
        structlog.processors.JSONRenderer()
        if config.format == "json"
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.StackInfoRenderer(),
            *([structlog.processors.format_exc_info] if config.format == "json" else []),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, config.level.upper())),
        logger_factory=_to_stderr,
    )
