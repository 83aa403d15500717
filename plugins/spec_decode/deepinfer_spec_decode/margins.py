"""How clearly drafts won: the distance of the best score to the second, which calibration reads beside the confidence.

A confidence head is linear in what leaves the module's last stage, and so does not know whether two tokens came out
nearly alike, which says most of a greedy draft. The distance is known before a token is drawn, so that under the
rejection rule it may count.
"""

from __future__ import annotations

import torch

from deepinfer_core.api import DraftStep

GROUP, MANY = 64, 5
"""Of many rows the best of so many scores at a time are found first: sorting whole rows takes three times as long."""
LARGEST = 60.0


class Margins:
    """Those of one step's drafts, taken as they are chosen."""

    def __init__(self, step: DraftStep) -> None:
        self._step = step
        self._found: list[torch.Tensor] = []

    def choose(self, scores: torch.Tensor, j: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As ``DraftStep.choose``."""
        best, second = _two_best(scores)
        self._found.append(best - second)
        return self._step.choose(scores, j)

    def all(self) -> torch.Tensor:
        """``[R, n]`` float32, how far the best score is above the second, within 0 to 60."""
        found = torch.stack(self._found, 1).to(torch.float32)
        return found.nan_to_num(0.0, LARGEST, 0.0).clamp(0.0, LARGEST)


def _two_best(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[R, V]`` -> ``[R]`` each."""
    rows, count = scores.shape
    if rows < MANY or count % GROUP or count == GROUP:
        best, second = scores.topk(2, dim=-1).values.unbind(1)
        return best, second
    groups = scores.view(rows, -1, GROUP)
    tops, which = groups.amax(-1).topk(2, dim=-1)
    # The second best is the best of another group, or stands beside the best in its own.
    own = groups.take_along_dim(which[:, :1, None], 1)[:, 0].topk(2, dim=-1).values
    return tops[:, 0], torch.maximum(tops[:, 1], own[:, 1])
