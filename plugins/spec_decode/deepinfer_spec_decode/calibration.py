"""How confidences are scaled, and where that lies: beside a checkpoint, for each way drafts are judged."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import attrs
import torch

from deepinfer_core.api import ConfigError, DrafterContext, DraftStep

from .needs import drafter_path
from .settings import Settings
from .sts import LARGEST_LOGIT, PLAIN, Scaling

FILE_NAME = "drafter_calibration.json"
GREEDY = "greedy"
"""Requests at temperature 0: judged exactly, and accepted more often than others that are."""


@attrs.frozen
class Calibration:
    """Of a drafter in use: ``drawn`` of requests with a temperature, ``greedy`` of those without, None: the same."""

    drawn: Scaling = PLAIN
    greedy: Scaling | None = None

    def confidence(self, logits: torch.Tensor, step: DraftStep) -> torch.Tensor:
        """``[R, n]`` confidence logits of the step's requests -> probabilities."""
        chances = scaled(logits, self.drawn)
        if self.greedy is None or self.greedy == self.drawn:
            return chances
        cold = step.state.temperature[step.slots] == 0
        return torch.where(cold[:, None], scaled(logits, self.greedy), chances)


def scaled(logits: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """``[R, n]`` confidence logits -> ``sigmoid(logit / T_j + b_j)`` float32, the argument kept within +-60."""
    logits = logits.to(torch.float32)
    if scaling != PLAIN:
        divisor, bias = _columns(scaling, logits.shape[1], logits.device)
        logits = logits / divisor + bias
    return torch.sigmoid(logits.clamp(-LARGEST_LOGIT, LARGEST_LOGIT))


@lru_cache(maxsize=16)
def _columns(scaling: Scaling, count: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Temperatures and biases of so many drafts, ``[count]`` float32 each. Asked for in every step."""
    with torch.inference_mode(False):
        columns = [scaling.at(j) for j in range(count)]
        return torch.tensor(columns, dtype=torch.float32, device=device).unbind(1)


def calibration_for(context: DrafterContext, method: str, settings: Settings) -> Calibration:
    """The user's temperatures, what was fitted beside the drafter's checkpoint (the target's where that has the
    drafter), or confidences as they are.

    Raises:
        ConfigError: the file is not what ``calibrate-drafter`` writes.
    """
    if context.temperatures is not None:
        return Calibration(Scaling(tuple(context.temperatures)))
    path = Path(drafter_path(settings.drafter) or context.target) / FILE_NAME
    if settings.calibration == "off" or not path.is_file():
        return Calibration()
    return Calibration(read_scaling(path, method, context.rule) or PLAIN, read_scaling(path, method, GREEDY))


def read_scaling(path: Path, method: str, rule: str) -> Scaling | None:
    """Of a drafter under a rule, None when nothing was fitted.

    Raises:
        ConfigError: the file is not what ``calibrate-drafter`` writes.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get(method, {}).get(rule, {})
        temperatures, biases = (_numbers(found.get(name, [])) for name in ("temperatures", "biases"))
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a calibration ({error}); run calibrate-drafter again or remove it") from error
    if any(not 0 < value < math.inf for value in temperatures):
        raise ConfigError(f"{path}: temperatures {list(temperatures)}: expected finite numbers above 0")
    if not all(map(math.isfinite, biases)):
        raise ConfigError(f"{path}: biases {list(biases)}: expected finite numbers")
    return Scaling(temperatures, biases or (0.0,)) if temperatures else None


def _numbers(values: Sequence[Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
