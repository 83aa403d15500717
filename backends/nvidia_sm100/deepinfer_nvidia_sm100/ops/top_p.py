"""``top_p``: the fewest best tokens that together reach a probability stay. See :mod:`.chain`.

Floor: bytes, 4·N·V read, and 4 written for each token that goes.
"""

from __future__ import annotations

import torch

from deepinfer_core.api import BuildContext, SamplingBatch, SamplingRequest

from . import chain


class TopP:
    """Keeps a token iff the probability of all better ones is below ``top_p``; the best always stays."""

    def __init__(self, request: SamplingRequest, context: BuildContext) -> None:
        pass

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N, V]`` float32, changed in place. Weights in float32; sums of parts in float32, over parts in float64,
        among the tokens at the limit exact."""
        return chain.cut(logits, batch, "top_p")
