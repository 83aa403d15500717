"""Speculation: a drafter guesses ahead, the engine verifies. Provisional until two plugins use it.

The engine owns verification, positions and rollback. It runs the target model over the last token and the
drafts in one step and draws its own token at every row, with the noise of that row's position and the history
the row would have had; a draft is accepted iff it equals the token drawn before it. Output is therefore what
it would have been without drafts, for greedy and seeded requests alike, up to how the model's numerics
depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from .provider import LazyRef

if TYPE_CHECKING:
    import numpy as np


@attrs.frozen(kw_only=True)
class DraftRow:
    """One request that is about to decode.

    Attributes:
        request_id, child: which completion; ``child`` is its index.
        tokens: ``[L]`` int32, prompt and output so far, read-only; valid during the call only.
        prompt_len: how many of them are the prompt.
        max_drafts: most tokens the engine can verify for this row.
    """

    request_id: str
    child: int
    tokens: np.ndarray[Any, Any]
    prompt_len: int
    max_drafts: int


@attrs.frozen(kw_only=True)
class Draft:
    """A guess: the next tokens in order, each with an optional confidence.

    ``confidence[j]`` estimates the probability that token j is accepted given that all before it were.
    """

    tokens: Sequence[int]
    confidence: Sequence[float] | None = None


@attrs.frozen(kw_only=True)
class Verified:
    """What became of a draft: ``accepted`` of ``proposed`` tokens, and the tokens that were committed."""

    request_id: str
    child: int
    proposed: int
    accepted: int
    tokens: Sequence[int]


class Drafter(Protocol):
    """Guesses tokens. Called from the engine's thread, between steps.

    A drafter that raises, or proposes an id outside the vocabulary, costs its drafts of that step and a log
    line; the requests go on without.
    """

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Draft]:
        """One draft per row, in order; an empty one is fine. Longer drafts than ``max_drafts`` are cut."""
        ...

    def verified(self, results: Sequence[Verified]) -> None:
        """Told after each verified step, for rows that had drafts."""
        ...

    def forget(self, request_id: str, child: int) -> None:
        """The completion ended or was preempted: drop what is kept for it."""
        ...


@attrs.frozen(kw_only=True)
class DrafterInfo:
    """Declared by ``deepinfer_speculation``: a drafter users name in ``speculation.method``.

    ``factory`` is called with the plugin's settings (or None) and returns a :class:`Drafter`.
    """

    name: str
    help: str
    factory: LazyRef
