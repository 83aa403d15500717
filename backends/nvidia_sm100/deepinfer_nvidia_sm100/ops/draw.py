"""``draw``: greedy rows take the best token, others ``argmax(logits - log E)``. See :mod:`.chain`.

E takes float64 logarithms, which few tokens need: the reading of the row bounds the scores of every 64 tokens without
a logarithm, and exact scores are computed for those groups alone whose bound reaches the best score found, most often
one.

Floor: bytes, 4·N·V: the logits once.
"""

from __future__ import annotations

import torch

from deepinfer_core.api import BuildContext, SamplingBatch, SamplingRequest

from . import chain


class Draw:
    """Greedy rows take the best token, others the seeded draw; lowest id on ties."""

    def __init__(self, request: SamplingRequest, context: BuildContext) -> None:
        pass

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N, V]`` float32 (not changed) -> ``[N]`` int64; -1 where the row holds a NaN, a +inf or only -inf."""
        return chain.draw(logits, batch, frozenset(), logits.shape[1])
