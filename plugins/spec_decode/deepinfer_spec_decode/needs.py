"""What each drafter needs of the engine. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer_core.api import ConfigError, DrafterNeeds

from .settings import Settings


def ngram(settings: Settings, target: Mapping[str, Any]) -> DrafterNeeds:
    """The device's token history."""
    return DrafterNeeds(reads="history")


def draft_model(settings: Settings, target: Mapping[str, Any]) -> DrafterNeeds:
    """A model of its own.

    Raises:
        ConfigError: none is named.
    """
    if not settings.draft_model:
        raise ConfigError(
            "speculation.method='draft_model': which? set plugins.spec_decode.draft_model to a checkpoint of the "
            "target's vocabulary"
        )
    return DrafterNeeds(reads="module", checkpoint=settings.draft_model)
