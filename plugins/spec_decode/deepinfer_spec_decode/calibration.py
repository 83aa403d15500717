"""Temperatures of the confidence, and where they lie: beside a checkpoint, one list for each verification rule."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from deepinfer_core.api import ConfigError, DrafterContext

from .needs import drafter_path
from .settings import Settings

FILE_NAME = "drafter_calibration.json"
LARGEST_LOGIT = 60.0


def temper(logits: torch.Tensor, temperatures: Sequence[float]) -> torch.Tensor:
    """``[R, n]`` confidence logits -> probabilities ``sigmoid(logit / T_j)``, the argument kept within +-60.

    The last temperature serves all further positions.
    """
    n = logits.shape[1]
    column = [temperatures[min(j, len(temperatures) - 1)] for j in range(n)]
    divisor = torch.tensor(column, dtype=torch.float32, device=logits.device)
    return torch.sigmoid((logits.to(torch.float32) / divisor).clamp(-LARGEST_LOGIT, LARGEST_LOGIT))


def temperatures_for(context: DrafterContext, method: str, settings: Settings) -> tuple[float, ...]:
    """The user's, those fitted beside the drafter's checkpoint (the target's where that has the drafter), or 1.

    Raises:
        ConfigError: the file is not what ``calibrate-drafter`` writes.
    """
    if context.temperatures is not None:
        return tuple(context.temperatures)
    path = Path(drafter_path(settings.drafter) or context.target) / FILE_NAME
    if settings.calibration == "off" or not path.is_file():
        return (1.0,)
    return read_temperatures(path, method, context.rule) or (1.0,)


def read_temperatures(path: Path, method: str, rule: str) -> tuple[float, ...]:
    """Temperatures of a drafter under a rule, empty when none were fitted."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get(method, {}).get(rule, {}).get("temperatures", [])
        temperatures = tuple(float(value) for value in found)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a calibration ({error}); run calibrate-drafter again or remove it") from error
    if any(not 0 < value < float("inf") for value in temperatures):
        raise ConfigError(f"{path}: temperatures {list(temperatures)}: expected finite numbers above 0")
    return temperatures
