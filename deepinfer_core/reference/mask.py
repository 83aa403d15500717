"""The first sampling stage: every rule that forbids a token outright."""

from __future__ import annotations

import torch

from deepinfer_core.api import BuildContext, SamplingBatch, SamplingRequest

_REMOVED = float("-inf")


def _unpack(bits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """``[N, ceil(V/32)]`` int32 -> ``[N, V]`` bool; bit ``id % 32`` of word ``id // 32``."""
    places = torch.arange(32, dtype=bits.dtype, device=bits.device)
    return ((bits[:, :, None] >> places) & 1 == 1).flatten(1)[:, :vocab_size]


def _forbid(forbidden: torch.Tensor, ids: torch.Tensor, where: torch.Tensor) -> None:
    """Set ``forbidden[row, ids[row, j]]`` for entries where ``where``; column V collects the rest."""
    spare = forbidden.shape[1] - 1
    usable = where & (ids >= 0) & (ids < spare)
    forbidden.scatter_(1, torch.where(usable, ids, spare), True)


def _bad_word_hits(words: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """``[N, W, L]`` words -> ``[N, W]`` bool: the tokens before the position end in all but the word's last token."""
    length = words.shape[2]
    prefix = words[:, :, :-1]
    before = batch.positions[:, None] - torch.arange(length - 1, 0, -1, device=words.device)
    tokens = batch.state.history[batch.slots[:, None], before.clamp(min=0)].to(torch.int64)
    same = (tokens[:, None] == prefix) & (before >= 0)[:, None]
    return (same | (prefix < 0)).all(dim=-1)


class Mask:
    """Sets to -inf: padding ids, ids outside the grammar's and the request's masks, stop ids below ``min_end``,
    and the last token of every bad word whose other tokens were just seen (prompt included).
    """

    def __init__(self, request: SamplingRequest, context: BuildContext) -> None:
        pass

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N, V]`` float32 -> fresh ``[N, V]``."""
        rows, vocab_size = logits.shape
        state, slots = batch.state, batch.slots
        forbidden = torch.zeros((rows, vocab_size + 1), dtype=torch.bool, device=logits.device)
        forbidden[:, batch.token_limit :] = True
        if batch.grammar is not None:
            forbidden[:, :-1] |= ~_unpack(batch.grammar, vocab_size)
        if state.allowed is not None:
            forbidden[:, :-1] |= ~_unpack(state.allowed[slots], vocab_size)
        early = (batch.positions < state.min_end[slots])[:, None]
        _forbid(forbidden, state.stop_ids[slots], early)
        if state.bad_words.shape[1] and state.bad_words.shape[2]:
            words = state.bad_words[slots]
            _forbid(forbidden, words[:, :, -1], _bad_word_hits(words, batch))
        return logits.masked_fill(forbidden[:, :-1], _REMOVED)
