"""What each drafter needs of the engine. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
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
    return DrafterNeeds(reads="module", checkpoint=settings.draft_model, setting="plugins.spec_decode.draft_model")


_DSPARK = {"DeepseekV4ForCausalLM": "DeepseekV4DSpark", "Qwen3ForCausalLM": "Qwen3DSparkModel"}
_MTP = {"DeepseekV4ForCausalLM": "DeepseekV4MTP"}


def dspark(settings: Settings, target: Mapping[str, Any]) -> DrafterNeeds:
    """A block-drafting module.

    Raises:
        ConfigError: there is none for such a target, or none is given.
    """
    architecture = _module_of("dspark", _DSPARK, target)
    if architecture == "Qwen3DSparkModel" and not settings.drafter:
        raise ConfigError("speculation.method='dspark': set plugins.spec_decode.drafter to a draft checkpoint")
    return _module(architecture, settings)


def mtp(settings: Settings, target: Mapping[str, Any]) -> DrafterNeeds:
    """A next-token module.

    Raises:
        ConfigError: there is none for such a target.
    """
    return _module(_module_of("mtp", _MTP, target), settings)


def _module(architecture: str, settings: Settings) -> DrafterNeeds:
    return DrafterNeeds(
        reads="module",
        architecture=architecture,
        checkpoint=drafter_path(settings.drafter),
        setting="plugins.spec_decode.drafter",
        names=shipped(),
    )


def _module_of(method: str, known: Mapping[str, str], target: Mapping[str, Any]) -> str:
    names = target.get("architectures") or []
    found = next((known[name] for name in names if name in known), None)
    if found is None:
        raise ConfigError(
            f"speculation.method={method!r}: no such module for {names!r}, only for {', '.join(known)}: use 'ngram' or "
            "'draft_model'"
        )
    return found


SHIPPED = Path(__file__).parent / "drafters"
"""Draft modules that come with the plugin, one directory each."""


def shipped() -> list[str]:
    """Their names."""
    return sorted(path.parent.name for path in SHIPPED.glob("*/config.json"))


def drafter_path(name: str) -> str | None:
    """A directory, or a shipped drafter by its name; a name wins. None for an empty one."""
    if not name:
        return None
    shipped = SHIPPED / name
    return str(shipped) if (shipped / "config.json").is_file() else name
