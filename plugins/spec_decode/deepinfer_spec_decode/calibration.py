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

from .log_loss import LARGEST_LOGIT
from .needs import drafter_path
from .settings import Settings
from .sts import PLAIN, Scaling

FILE_NAME = "drafter_calibration.json"
GREEDY = "greedy"
"""Requests at temperature 0: judged exactly, and accepted more often than others that are."""


@attrs.frozen
class Calibration:
    """Of a drafter in use: ``drawn`` of requests with a temperature, ``greedy`` of those without, None: the same."""

    drawn: Scaling = PLAIN
    greedy: Scaling | None = None

    @property
    def reads_margins(self) -> bool:
        """Whether how clearly a draft won counts (:mod:`.margins`)."""
        return bool(self.drawn.margins or (self.greedy is not None and self.greedy.margins))

    def confidence(self, logits: torch.Tensor, step: DraftStep, margins: torch.Tensor | None = None) -> torch.Tensor:
        """``[R, n]`` confidence logits of the step's requests, and margins where they are read -> probabilities."""
        chances = scaled(logits, self.drawn, margins)
        if self.greedy is None or self.greedy == self.drawn:
            return chances
        cold = step.state.temperature[step.slots] == 0
        return torch.where(cold[:, None], scaled(logits, self.greedy, margins), chances)


def scaled(logits: torch.Tensor, scaling: Scaling, margins: torch.Tensor | None = None) -> torch.Tensor:
    """``[R, n]`` confidence logits and margins -> ``sigmoid(logit / T_j + b_j + s_j m + r_j sqrt(m))`` float32, the
    argument kept within +-60.
    """
    logits = logits.to(torch.float32)
    if scaling != PLAIN:
        divisor, bias, slope, root = _columns(scaling, logits.shape[1], logits.device)
        logits = logits / divisor + bias
        if scaling.margins and margins is not None:
            logits = logits + slope * margins + root * margins.sqrt()
    return torch.sigmoid(logits.clamp(-LARGEST_LOGIT, LARGEST_LOGIT))


@lru_cache(maxsize=16)
def _columns(scaling: Scaling, count: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Temperatures, biases and the margins' two weights of so many drafts, ``[count]`` float32 each. Asked for in every
    step."""
    with torch.inference_mode(False):
        columns = [(*scaling.at(j), *scaling.margin_at(j)) for j in range(count)]
        return torch.tensor(columns, dtype=torch.float32, device=device).unbind(1)


def calibration_for(context: DrafterContext, method: str, settings: Settings, *, margins: bool = False) -> Calibration:
    """The user's temperatures, what was fitted beside the drafter's checkpoint (the target's where that has the
    drafter), or confidences as they are. ``margins``: whether this drafter says how clearly its drafts won.

    Raises:
        ConfigError: the file is not what ``calibrate-drafter`` writes, or of a drafter that says more.
    """
    if context.temperatures is not None:
        return Calibration(Scaling(tuple(context.temperatures)))
    own = settings.draft_model if method == "draft_model" else settings.drafter
    path = Path(drafter_path(own) or context.target) / FILE_NAME
    if settings.calibration == "off" or not path.is_file():
        return Calibration()
    found = Calibration(read_scaling(path, method, context.rule) or PLAIN, read_scaling(path, method, GREEDY))
    if found.reads_margins and not margins:
        raise ConfigError(f"{path}: 'margins' of {method!r}, which has none: run calibrate-drafter again or remove it")
    return found


def read_scaling(path: Path, method: str, rule: str) -> Scaling | None:
    """Of a drafter under a rule, None when nothing was fitted.

    Raises:
        ConfigError: the file is not what ``calibrate-drafter`` writes.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get(method, {}).get(rule, {})
        temperatures, biases = (_numbers(found.get(name, [])) for name in ("temperatures", "biases"))
        margins = tuple(_numbers(pair) for pair in found.get("margins", []))
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a calibration ({error}); run calibrate-drafter again or remove it") from error
    if any(not 0 < value < math.inf for value in temperatures):
        raise ConfigError(f"{path}: temperatures {list(temperatures)}: expected finite numbers above 0")
    if not all(map(math.isfinite, biases)):
        raise ConfigError(f"{path}: biases {list(biases)}: expected finite numbers")
    if not all(len(pair) == 2 and all(map(math.isfinite, pair)) for pair in margins):
        raise ConfigError(f"{path}: margins {[list(pair) for pair in margins]}: expected pairs of finite numbers")
    pairs = tuple((pair[0], pair[1]) for pair in margins)
    return Scaling(temperatures, biases or (0.0,), pairs) if temperatures else None


def _numbers(values: Sequence[Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
