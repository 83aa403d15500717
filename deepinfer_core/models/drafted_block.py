"""What a block drafter gives, token by token."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

Choose = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor | None]]
"""``(scores [R, V] float32, j)`` -> tokens ``[R]`` int64 of draft j, and the scores they were drawn from if they are
wanted later. The scores are given away."""


def greedy(scores: torch.Tensor, j: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The most likely token."""
    return scores.argmax(dim=-1), scores


@attrs.frozen(kw_only=True)
class DraftedBlock:
    """What one drafting step gives.

    Attributes:
        tokens: ``[R, n]`` int64; token j is a guess at position p + 2 + j, p being the last that the target processed.
        scores: ``[R, n, vocab]`` float32, what they were chosen from, or None if nobody wants it.
        confidence: ``[R, n]`` float32 logits: their sigmoid estimates the chance that draft j is accepted if all before
            it are. None without a confidence head.
    """

    tokens: torch.Tensor
    scores: torch.Tensor | None
    confidence: torch.Tensor | None

    @staticmethod
    def gather() -> Gathering:
        """An empty block to add drafts to."""
        return Gathering()


class Gathering:
    """A block being drafted, left to right."""

    def __init__(self) -> None:
        self._tokens: list[torch.Tensor] = []
        self._scores: list[torch.Tensor] = []
        self._confidence: list[torch.Tensor] = []

    def add(self, chosen: tuple[torch.Tensor, torch.Tensor | None], confidence: torch.Tensor | None) -> torch.Tensor:
        """One draft of each request; returns its tokens."""
        tokens, scores = chosen
        self._tokens.append(tokens)
        if scores is not None:
            self._scores.append(scores)
        if confidence is not None:
            self._confidence.append(confidence)
        return tokens

    def done(self) -> DraftedBlock:
        return DraftedBlock(
            tokens=torch.stack(self._tokens, 1),
            scores=torch.stack(self._scores, 1) if self._scores else None,
            confidence=torch.stack(self._confidence, 1) if self._confidence else None,
        )
