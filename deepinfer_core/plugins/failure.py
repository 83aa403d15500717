"""What is remembered, and logged once, about a plugin that could not be used."""

from __future__ import annotations

import traceback
from typing import Literal

import attrs
import structlog

from deepinfer_core.api import DeepInferError

log = structlog.get_logger("deepinfer.plugins")

Stage = Literal["stale", "version", "duplicate", "import", "register", "identity", "needs", "conflict", "hook"]


@attrs.frozen(kw_only=True)
class Failure:
    """A plugin, or one of its answers, that was dropped.

    Attributes:
        name: entry-point name. distribution, version: who ships it. path: its metadata, module or file.
        stage: what was being done; ``hook`` failures drop one answer, all others the whole plugin.
        cause: one line. traceback: all of it, empty when no code of the plugin ran.
    """

    name: str
    distribution: str
    version: str
    path: str
    stage: Stage
    cause: str
    traceback: str = ""

    def __str__(self) -> str:
        return f"plugin {self.name!r} of {self.distribution} {self.version} ({self.path}): {self.stage}: {self.cause}"

    def log(self) -> None:
        """The one warning line of a plugin that is merely installed and broken."""
        log.warning(
            "plugin_failed",
            plugin=self.name,
            distribution=self.distribution,
            path=self.path,
            stage=self.stage,
            cause=self.cause,
        )


def cause_line(error: BaseException) -> str:
    """``"ModuleNotFoundError: No module named 'x'"``, on one line; our own errors need no type."""
    text = " ".join(str(error).split())
    if isinstance(error, DeepInferError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def full_traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
