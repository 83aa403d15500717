"""A smaller model of the target's vocabulary drafts token by token (Leviathan et al. 2023, arXiv:2211.17192)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer_core.api import DrafterContext, DraftStep, Proposal, Verified

from .calibration import temper, temperatures_for
from .records import Recorder
from .settings import Settings


class DraftModel:
    """Runs every row of the target too, so that its caches are shared and evicted with the target's."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._recorder = Recorder(settings.record_file)

    def start(self, context: DrafterContext) -> None:
        self._model = context.module
        self._temperatures = temperatures_for(context, "draft_model", self._settings)

    def absorb(self, step: DraftStep) -> None:
        assert step.rows is not None
        self._model.forward(step.rows, self._model.plan(step.rows))

    def propose(self, step: DraftStep) -> Proposal:
        tokens = step.state.history[step.slots, step.anchors].to(torch.int64)
        drafts, kept, chances = [], [], []
        for j in range(step.depth):
            batch = step.block(tokens[:, None], j)
            logits = self._model.logits(self._model.forward(batch, self._model.plan(batch)))
            before = torch.log_softmax(logits.to(torch.float32), dim=-1)
            tokens, scores = step.choose(logits, j)
            drafts.append(tokens)
            chances.append(before.gather(1, tokens.clamp(min=0)[:, None])[:, 0])
            if scores is not None:
                kept.append(scores)
        return Proposal(
            tokens=torch.stack(drafts, 1),
            confidence=temper(as_logit(torch.stack(chances, 1)), self._temperatures),
            scores=torch.stack(kept, 1) if kept else None,
        )

    def verified(self, results: Sequence[Verified]) -> None:
        self._recorder.add(results)


def as_logit(logprobs: torch.Tensor) -> torch.Tensor:
    """A model's probability of its own draft, as the logit of a confidence: calibrated like any other."""
    chance = logprobs.clamp(max=-1e-6)
    return chance - torch.log(-torch.expm1(chance))
