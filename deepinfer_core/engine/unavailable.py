"""Settings whose feature this version does not have: asked for, they are refused, never ignored."""

from __future__ import annotations

from deepinfer_core.api import ConfigError
from deepinfer_core.config import EngineConfig


def refuse_unavailable(config: EngineConfig) -> None:
    """Raise ConfigError for a setting that nothing would act on."""
    if config.structured_outputs.backend != "auto":
        raise ConfigError(
            f"structured_outputs.backend={config.structured_outputs.backend!r}: no plugin brings structured output in "
            "this version: use 'auto'"
        )
