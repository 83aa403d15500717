"""DSpark and DFlash: a draft module drafts a block at once from layers of its target (arXiv:2607.05147)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer_core.api import DrafterContext, DraftStep, Proposal, Verified

from .calibration import calibration_for
from .margins import Margins
from .rates import AcceptanceRates
from .records import Recorder
from .settings import Settings
from .waiting import WaitingRows


class BlockDrafter:
    """Injects what the target's layers say into the module's caches, then drafts from there.

    A module without a confidence head has as confidence how often its drafts were accepted. While nobody drafts, rows
    wait and are injected together, when a draft may read them.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._recorder = Recorder(settings.record_file)
        self._waiting = WaitingRows()

    def start(self, context: DrafterContext) -> None:
        self._module = context.module
        self._rates = AcceptanceRates(context.max_draft_tokens)
        self._calibration = calibration_for(context, "dspark", self._settings, margins=True)
        self._measures = self._calibration.reads_margins or self._recorder.records

    def absorb(self, step: DraftStep) -> None:
        assert step.rows is not None
        for rows, taps in self._waiting.due(step, step.rows, step.taps):
            self._module.inject(taps, rows, self._module.plan_context(rows))

    def propose(self, step: DraftStep) -> Proposal:
        newest = step.state.history[step.slots, step.anchors].to(torch.int64)
        batch = step.block(self._module.inputs(newest), 0)
        margins = Margins(step) if self._measures else None
        choose = step.choose if margins is None else margins.choose
        drafted = self._module.draft(batch, self._module.plan(batch), step.depth, choose)
        found = None if margins is None else margins.all()
        if drafted.confidence is None:
            rates = torch.from_numpy(self._rates.confidence()).to(newest.device)
            confidence = rates[: step.depth].expand(drafted.tokens.shape)
        else:
            confidence = self._calibration.confidence(drafted.confidence, step, found)
        return Proposal(
            tokens=drafted.tokens,
            confidence=confidence,
            scores=drafted.scores,
            learned=drafted.confidence is None,
            notes=found if self._recorder.records else None,
        )

    def verified(self, results: Sequence[Verified]) -> None:
        self._rates.learn(results)
        self._recorder.add(results)
