"""Log lines of the program: on standard error, so that standard output holds results only."""

from __future__ import annotations

import logging
import sys

import structlog

from deepinfer_core.config import LoggingConfig


def log_to_stderr(config: LoggingConfig) -> None:
    """Configure structlog for this process: level, and lines for people or JSON."""
    levels = logging.getLevelNamesMapping()
    json = config.format == "json"
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso" if json else "%H:%M:%S", utc=json),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer()
            if json
            else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(levels[config.level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
