"""MTP: the next-token module of a DeepSeek checkpoint, applied as often as drafts are wanted (arXiv:2412.19437)."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from deepinfer_core.api import DrafterContext, DraftStep, Proposal, Verified

from .calibration import temperatures_for
from .records import Recorder
from .settings import Settings
from .spoken import SpokenDrafts


class MTPDrafter:
    """Row t of the module reads the target's streams of t and the token t + 1, and speaks of t + 2.

    Its cached row at t therefore knows one token more than the block it lies in: after a prefix hit the last row may
    belong to another continuation. That costs a draft now and then, never a token.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._recorder = Recorder(settings.record_file)

    def start(self, context: DrafterContext) -> None:
        self._module = context.module
        self._temperatures = temperatures_for(context, "mtp", self._settings)

    def absorb(self, step: DraftStep) -> None:
        assert step.rows is not None
        rows = attrs.evolve(step.rows, token_ids=step.next_tokens())
        hidden, streams = self._module.forward(rows, self._module.plan(rows), step.taps[0])
        self._last = hidden[step.last_rows], streams[step.last_rows]

    def propose(self, step: DraftStep) -> Proposal:
        hidden, streams = self._last
        drafts = SpokenDrafts(step)
        tokens = drafts.draw(self._module.logits(hidden))
        for j in range(step.depth - 1):
            batch = step.block(tokens.clamp(min=0)[:, None], j)
            hidden, streams = self._module.forward(batch, self._module.plan(batch), streams)
            tokens = drafts.draw(self._module.logits(hidden))
        return drafts.proposal(self._temperatures)

    def verified(self, results: Sequence[Verified]) -> None:
        self._recorder.add(results)
