"""Speculative rejection sampling (Leviathan et al. 2023, arXiv:2211.17192), in float64."""

from __future__ import annotations

import torch

from deepinfer_core.api import (
    PURPOSE_COIN,
    PURPOSE_RESIDUAL,
    BuildContext,
    JudgedRows,
    SamplingBatch,
    SamplingRequest,
)

from .draw import lowest_argmax
from .philox import log_exponential, noise_words


class Verify:
    """Takes a draft x with probability ``min(1, p(x) / d(x))``, or draws from ``max(p - d, 0)``."""

    def __init__(self, request: SamplingRequest, context: BuildContext) -> None:
        pass

    def run(self, logits: torch.Tensor, batch: SamplingBatch, tokens: torch.Tensor, judged: JudgedRows) -> torch.Tensor:
        """``[N, V]`` float32, ``[N]`` int64 -> fresh ``[N]`` int64."""
        usable = tokens[judged.rows] >= 0
        rows, drafts = judged.rows[usable], judged.drafts[usable]
        target = torch.softmax(logits[rows].to(torch.float64), dim=-1)
        if judged.scores is None:
            draft = torch.nn.functional.one_hot(drafts, logits.shape[1]).to(torch.float64)
        else:
            draft = torch.softmax(judged.scores[usable].to(torch.float64), dim=-1)
        p, d = (x.gather(1, drafts[:, None])[:, 0] for x in (target, draft))
        coin = (self._words(batch, rows, PURPOSE_COIN, 1)[:, 0].to(torch.float64) + 0.5) * 2.0**-32
        kept = coin * d < p  # not where d is NaN: what was drawn from no distribution is never taken
        draft = draft.nan_to_num(nan=0.0)
        result = tokens.clone()
        result[rows] = torch.where(kept, drafts, self._residual(target, draft, batch, rows))
        return result

    def _residual(
        self, target: torch.Tensor, draft: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor
    ) -> torch.Tensor:
        rest = (target - draft).clamp(min=0.0)
        empty = rest.amax(dim=-1, keepdim=True) <= 0.0
        rest = torch.where(empty, target, rest)
        noise = log_exponential(self._words(batch, rows, PURPOSE_RESIDUAL, target.shape[1]))
        return lowest_argmax(rest.log() - noise)

    def _words(self, batch: SamplingBatch, rows: torch.Tensor, purpose: int, count: int) -> torch.Tensor:
        state, slots = batch.state, batch.slots[rows]
        where = (state.seed_lo[slots], state.seed_hi[slots], state.child[slots], batch.positions[rows])
        return noise_words(*where, purpose, count)
