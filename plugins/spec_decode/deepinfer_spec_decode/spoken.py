"""Drafts spoken one by one by a model: each drawn from its logits, its own probability kept as the confidence."""

from __future__ import annotations

import torch

from deepinfer_core.api import DraftStep, Proposal

from .calibration import Calibration


class SpokenDrafts:
    """Collects the drafts of one step."""

    def __init__(self, step: DraftStep) -> None:
        self._step = step
        self._tokens: list[torch.Tensor] = []
        self._chances: list[torch.Tensor] = []
        self._scores: list[torch.Tensor] = []

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """``[R, V]`` logits of the next position -> its drafts ``[R]`` int64."""
        before = torch.log_softmax(logits.to(torch.float32), dim=-1)
        tokens, scores = self._step.choose(logits, len(self._tokens))
        self._tokens.append(tokens)
        self._chances.append(before.gather(1, tokens.clamp(min=0)[:, None])[:, 0])
        if scores is not None:
            self._scores.append(scores)
        return tokens

    def proposal(self, calibration: Calibration) -> Proposal:
        """All that was drawn."""
        return Proposal(
            tokens=torch.stack(self._tokens, 1),
            confidence=calibration.confidence(as_logit(torch.stack(self._chances, 1)), self._step),
            scores=torch.stack(self._scores, 1) if self._scores else None,
        )


def as_logit(logprobs: torch.Tensor) -> torch.Tensor:
    """A model's probability of its own draft, as the logit of a confidence: calibrated like any other."""
    chance = logprobs.clamp(max=-1e-6)
    return chance - torch.log(-torch.expm1(chance))
