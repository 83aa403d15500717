"""MTP: the next-token module of a DeepSeek checkpoint, applied as often as drafts are wanted (arXiv:2412.19437)."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from deepinfer_core.api import DrafterContext, DraftStep, Proposal, Verified

from .calibration import calibration_for
from .records import Recorder
from .settings import Settings
from .spoken import SpokenDrafts
from .waiting import WaitingRows


class MTPDrafter:
    """Row t of the module reads the target's streams of t and the token t + 1, and speaks of t + 2.

    Its cached row at t therefore knows one token more than the block it lies in: after a prefix hit the last row may
    belong to another continuation. That costs a draft now and then, never a token.

    What the rows before the last say is not asked for: of them only the keys are made, of many together while nobody
    drafts.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._recorder = Recorder(settings.record_file)
        self._waiting = WaitingRows()

    def start(self, context: DrafterContext) -> None:
        self._module = context.module
        self._rule = context.rule
        self._calibration = calibration_for(context, "mtp", self._settings)

    def absorb(self, step: DraftStep) -> None:
        assert step.rows is not None
        followed = attrs.evolve(step.rows, token_ids=step.next_tokens())
        for rows, (streams,) in self._waiting.due(step, followed, step.taps):
            self._module.inject(streams, rows, self._module.plan_context(rows))

    def propose(self, step: DraftStep) -> Proposal:
        drafts = SpokenDrafts(step, self._rule)
        tokens = step.state.history[step.slots, step.anchors].to(torch.int64)
        streams = step.taps[0][step.last_rows]
        for j in range(step.depth):
            # Row 0 is the one before the newest token, whose keys are there: they are written again.
            batch = step.block(tokens.clamp(min=0)[:, None], j - 1)
            hidden, streams = self._module.forward(batch, self._module.plan(batch), streams)
            tokens = drafts.draw(self._module.logits(hidden))
        return drafts.proposal(self._calibration)

    def verified(self, results: Sequence[Verified]) -> None:
        self._recorder.add(results)
