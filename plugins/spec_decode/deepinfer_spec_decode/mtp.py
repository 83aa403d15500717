"""MTP: the next-token module of a DeepSeek checkpoint, applied as often as drafts are wanted (arXiv:2412.19437)."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from deepinfer_core.api import DrafterContext, DraftStep, Proposal, Verified

from .calibration import temper, temperatures_for
from .draft_model import as_logit
from .records import Recorder
from .settings import Settings


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
        drafts: list[torch.Tensor] = []
        kept, chances = [], []
        for j in range(step.depth):
            if j:
                batch = step.block(drafts[-1].clamp(min=0)[:, None], j - 1)
                hidden, streams = self._module.forward(batch, self._module.plan(batch), streams)
            logits = self._module.logits(hidden)
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
