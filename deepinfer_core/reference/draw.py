"""The last sampling stage: greedy rows take the best token, others a seeded Gumbel draw."""

from __future__ import annotations

import torch

from deepinfer_core.api import GREEDY_TEMPERATURE, PURPOSE_DRAW, BuildContext, SamplingBatch, SamplingRequest

from .philox import log_exponential, noise_words

_TOKENS_AT_ONCE = 1 << 20  # bounds the noise's temporaries, about 64 bytes for each row and token


def lowest_argmax(scores: torch.Tensor) -> torch.Tensor:
    """``[N, V]`` -> ``[N]`` int64: lowest id of the largest score. A row with a NaN gives V."""
    vocab_size = scores.shape[1]
    ids = torch.arange(vocab_size, device=scores.device)
    best = scores.amax(dim=-1, keepdim=True)
    return torch.where(scores == best, ids, vocab_size).amin(dim=-1)


class Draw:
    """``argmax(logits - log E)`` with the noise of the row's seed, child and position."""

    def __init__(self, request: SamplingRequest, context: BuildContext) -> None:
        pass

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N, V]`` float32 (not changed) -> ``[N]`` int64; -1 where the row holds a NaN, a +inf or only -inf."""
        broken = ~logits.amax(dim=-1).isfinite()  # a NaN wins amax
        scores = logits.clone()
        sampled = (batch.state.temperature[batch.slots] >= GREEDY_TEMPERATURE).nonzero().squeeze(-1)
        vocab_size = logits.shape[1]
        for rows in torch.split(sampled, max(1, _TOKENS_AT_ONCE // vocab_size)):
            scores[rows] = logits[rows] - self._log_noise(batch, rows, vocab_size)
        return torch.where(broken, -1, lowest_argmax(scores))

    def _log_noise(self, batch: SamplingBatch, rows: torch.Tensor, vocab_size: int) -> torch.Tensor:
        state, slots = batch.state, batch.slots[rows]
        words = noise_words(
            state.seed_lo[slots],
            state.seed_hi[slots],
            state.child[slots],
            batch.positions[rows],
            PURPOSE_DRAW,
            vocab_size,
        )
        return log_exponential(words)
