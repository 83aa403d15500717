"""What a step runs: the planner's answer, before and after its drafts are known."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from .request import Sequence
from .speculation_plan import DraftTurn

Array = np.ndarray[Any, Any]


@attrs.define(kw_only=True)
class StepPlan:
    """Rows of one step. R requests own ``counts`` rows each, starting at position ``starts``.

    The last ``samples`` rows of each yield a token: none within a prompt, one at its end or in decoding, one
    more per draft being verified. Decode rows come first. ``admitted`` are the sequences that took a slot in
    this step, so that the runner writes their device state before it runs; ``drafts`` maps slots to tokens, and
    ``confidence`` to what the drafter said of them, ``notes`` to what it noted. Drafts of ``forced`` slots come from a
    grammar that allows nothing else. ``rejects`` ``[R]``: whose drafts are judged by rejection.
    ``turn`` is there with a device drafter: then starts, counts and samples are upper bounds until the step runs.
    """

    number: int
    slots: Array
    starts: Array
    counts: Array
    samples: Array
    admitted: list[Sequence]
    drafts: dict[int, Array]
    rejects: Array | None = None
    turn: DraftTurn | None = None
    confidence: dict[int, Array] = attrs.field(factory=dict)
    notes: dict[int, Array] = attrs.field(factory=dict)
    forced: frozenset[int] = frozenset()

    @property
    def offers_nothing(self) -> bool:
        """True when starts, counts and samples are what will run, with a device drafter too."""
        turn = self.turn
        return turn is None or not (self.drafts or turn.caps.any() or turn.floating.any())

    @property
    def drafts_nothing(self) -> bool:
        """True when no drafts are verified, and a device drafter is to make none. Of a plan whose drafts are known."""
        return not self.drafts and (self.turn is None or not self.turn.propose)

    @property
    def num_tokens(self) -> int:
        """Rows; with a device drafter at most as many as may be verified in all."""
        spare = 0 if self.turn is None or self.drafts else int(self.turn.caps.sum()) - self.turn.total
        return int(self.counts.sum()) - spare
