"""A smaller model of the target's vocabulary drafts token by token (Leviathan et al. 2023, arXiv:2211.17192)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer_core.api import DrafterContext, DraftStep, Proposal, Verified

from .calibration import calibration_for
from .records import Recorder
from .settings import Settings
from .spoken import SpokenDrafts


class DraftModel:
    """Runs every row of the target too, so that its caches are shared and evicted with the target's."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._recorder = Recorder(settings.record_file)

    def start(self, context: DrafterContext) -> None:
        self._model = context.module
        self._rule = context.rule
        self._calibration = calibration_for(context, "draft_model", self._settings)

    def absorb(self, step: DraftStep) -> None:
        assert step.rows is not None
        self._model.forward(step.rows, self._model.plan(step.rows))

    def propose(self, step: DraftStep) -> Proposal:
        tokens = step.state.history[step.slots, step.anchors].to(torch.int64)
        drafts = SpokenDrafts(step, self._rule)
        for j in range(step.depth):
            batch = step.block(tokens[:, None], j)
            tokens = drafts.draw(self._model.logits(self._model.forward(batch, self._model.plan(batch))))
        return drafts.proposal(self._calibration)

    def verified(self, results: Sequence[Verified]) -> None:
        self._recorder.add(results)
