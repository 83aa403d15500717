"""Drafts spoken one by one by a model: each drawn from its logits, whose probabilities are the confidence.

The probability of the very token that was drawn says most, but under rejection it must not count: were likely tokens
verified rather than others, they would be said more often than the target says them. There the largest probability of
the row stands for it, which is known before the token is.
"""

from __future__ import annotations

from typing import Literal

import torch

from deepinfer_core.api import DraftStep, Proposal

from .calibration import Calibration


class SpokenDrafts:
    """Collects the drafts of one step. ``rule``: of the engine, as in :class:`DrafterContext`."""

    def __init__(self, step: DraftStep, rule: Literal["exact", "rejection"]) -> None:
        self._step = step
        self._rule = rule
        self._tokens: list[torch.Tensor] = []
        self._chances: list[torch.Tensor] = []
        self._scores: list[torch.Tensor] = []

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """``[R, V]`` logits of the next position -> its drafts ``[R]`` int64."""
        before = torch.log_softmax(logits.to(torch.float32), dim=-1)
        tokens, scores = self._step.choose(logits, len(self._tokens))
        self._tokens.append(tokens)
        own = before.gather(1, tokens.clamp(min=0)[:, None])[:, 0]
        self._chances.append(own if self._rule == "exact" else before.amax(dim=-1))
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
