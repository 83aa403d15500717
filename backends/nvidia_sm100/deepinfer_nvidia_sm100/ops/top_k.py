"""``top_k``: the k best tokens of a row stay. See :mod:`.chain`.

Floor: bytes, 4·N·V read, and 4 written for each token that goes.
"""

from __future__ import annotations

import torch

from deepinfer_core.api import BuildContext, SamplingBatch, SamplingRequest

from . import chain


class TopK:
    """Keeps exactly the ``top_k`` best, score descending, then id ascending; below 1 or above V is off."""

    def __init__(self, request: SamplingRequest, context: BuildContext) -> None:
        pass

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N, V]`` float32, changed in place."""
        return chain.cut(logits, batch, "top_k")
