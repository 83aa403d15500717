"""Prompt lookup: a draft is what followed the last tokens where they stood before (Saxena 2023).

Works on the device's history, so that nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer_core.api import DrafterContext, DraftStep, Proposal, Verified

from .rates import AcceptanceRates
from .records import Recorder
from .settings import Settings

NO_TOKEN = -1


def lookup(history: torch.Tensor, anchors: torch.Tensor, depth: int, longest: int, shortest: int) -> torch.Tensor:
    """``[R, depth]`` int64 drafts, -1 where nothing matched.

    Args:
        history: ``[R, L]`` token ids, of which those up to the anchor count. anchors: ``[R]`` int64.

    The longest run of ``shortest..longest`` last tokens that occurred before wins, of equal ones the newest. A match
    that runs into the anchor goes on with itself, as what repeats does.
    """
    rows, width = history.shape
    place = torch.arange(width, device=history.device)
    alike = torch.ones((rows, width), dtype=torch.bool, device=history.device)
    best = torch.full((rows,), NO_TOKEN, dtype=torch.int64, device=history.device)
    for length in range(1, longest + 1):
        # alike[r, p]: the tokens p-length+1..p equal the last ``length`` ones.
        wanted = history.gather(1, (anchors - length + 1).clamp(min=0)[:, None])
        shifted = torch.roll(history, length - 1, dims=1)
        alike &= (shifted == wanted) & (place >= length - 1) & (place < anchors[:, None])
        if length >= shortest:
            newest = torch.where(alike, place, NO_TOKEN).amax(dim=1)
            best = torch.where(newest >= 0, newest, best)
    period = (anchors - best).clamp(min=1)
    steps = torch.arange(depth, device=history.device)
    source = best[:, None] + 1 + steps % period[:, None]
    drafts = history.gather(1, source.clamp(min=0, max=width - 1)).to(torch.int64)
    return torch.where(best[:, None] >= 0, drafts, NO_TOKEN)


class NGramDrafter:
    """Needs no module and no cache."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._recorder = Recorder(settings.record_file)

    def start(self, context: DrafterContext) -> None:
        self._rates = AcceptanceRates(context.max_draft_tokens)

    def absorb(self, step: DraftStep) -> None:
        """The history is kept by the engine."""

    def propose(self, step: DraftStep) -> Proposal:
        history = step.state.history[step.slots, : int(step.host_anchors.max()) + 1]
        tokens = lookup(history, step.anchors, step.depth, self._settings.ngram_max, self._settings.ngram_min)
        rates = torch.from_numpy(self._rates.confidence()).to(tokens.device)
        return Proposal(tokens=tokens, confidence=rates.expand(tokens.shape), learned=True)

    def verified(self, results: Sequence[Verified]) -> None:
        self._rates.learn(results)
        self._recorder.add(results)
