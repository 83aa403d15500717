"""``fused.sample_tokens``: temperature, top-k, top-p and draw without writing the logits. See :mod:`.chain`.

Floor: bytes, 4·N·V: the logits once. Of rows of which top-p may keep thousands of tokens,
every fourth or fifth is read twice; with few rows in the step, all of them.
"""

from __future__ import annotations

import torch

from deepinfer_core.api import SAMPLED_TOGETHER, BuildContext, SampleTokensRequest, SamplingBatch

from . import chain


class SampleTokens:
    """The stages that are active, and the draw."""

    def __init__(self, request: SampleTokensRequest, context: BuildContext) -> None:
        pass

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N, V]`` float32 (not changed) -> ``[N]`` int64; -1 for a broken or empty row."""
        return chain.draw(logits, batch, batch.active.intersection(SAMPLED_TOGETHER), batch.token_limit)
