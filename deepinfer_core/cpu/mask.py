"""The mask stage on the host: bit masks become logits by table lookup, in place, row by row.

The reference asks for each token whether its bit is set and selects, which costs as much for a row that has no mask,
and most where masks are irregular, since a select branches. Here eight tokens are looked up at once, and two integer
operations over the row's bit patterns remove what is closed: all bits are set, then those of the fraction are cleared,
which leaves -inf. Open logits keep their bits, NaN included. One row at a time stays in the processor's cache.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import attrs
import numpy as np
import torch

from deepinfer_core.api import BuildContext, SamplingBatch, SamplingRequest

Words: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]

_FRACTION = np.int32(0x007FFFFF)
"""Bits of a float32's fraction: all bits but these are -inf's."""

_CLOSED: Words = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.int32) - 1
"""``[256, 8]``: for each byte of a mask and each of its tokens all bits set where the token is closed, else none."""


class Mask:
    """Removes padding ids, ids outside the grammar's and the request's masks, stop ids below ``min_end``; the rows
    that have bad words are the reference's.
    """

    def __init__(self, request: SamplingRequest, context: BuildContext) -> None:
        self._reference = context.reference(request)
        tokens = -(-request.vocab_size // 8)
        self._closed = np.empty((tokens, 8), np.int32)
        self._fraction = np.empty(request.vocab_size, np.int32)

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N, V]`` float32, written in place -> the same tensor."""
        state, slots = batch.state, batch.slots.numpy()
        values = logits.view(torch.int32).numpy()
        words = _masks(batch)
        if words is not None:
            for row in np.flatnonzero((words != -1).any(axis=1)):
                self._close(values[row], words[row])
        logits[:, batch.token_limit :] = float("-inf")
        early = np.flatnonzero(batch.positions.numpy() < state.min_end.numpy()[slots])
        if len(early):
            stops = state.stop_ids.numpy()[slots[early]]
            usable = (stops >= 0) & (stops < logits.shape[1])
            logits.numpy()[np.broadcast_to(early[:, None], stops.shape)[usable], stops[usable]] = -np.inf
        if state.bad_words.numel():
            worded = (state.bad_words.numpy()[slots] >= 0).any(axis=(1, 2)).nonzero()[0]
            if len(worded):
                self._bad_words(logits, batch, torch.from_numpy(worded))
        return logits

    def _close(self, values: Words, words: Words) -> None:
        """Remove from one row ``[V]``, seen as integers, what its mask ``[ceil(V / 32)]`` closes."""
        count = len(self._closed)
        np.take(_CLOSED, words.view(np.uint8)[:count], axis=0, out=self._closed, mode="clip")
        closed = self._closed.reshape(-1)[: len(values)]
        np.bitwise_or(values, closed, out=values)
        np.bitwise_and(closed, _FRACTION, out=self._fraction)
        np.bitwise_xor(values, self._fraction, out=values)

    def _bad_words(self, logits: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor) -> None:
        alone = attrs.evolve(batch, slots=batch.slots[rows], positions=batch.positions[rows], grammar=None)
        logits[rows] = self._reference.run(logits[rows], alone)


def _masks(batch: SamplingBatch) -> Words | None:
    """``[N, ceil(V / 32)]``: what grammar and request both leave open; None when neither says anything."""
    grammar = None if batch.grammar is None else batch.grammar.numpy()
    if batch.state.allowed is None:
        return grammar
    allowed: Words = batch.state.allowed.numpy()[batch.slots.numpy()]
    return allowed if grammar is None else allowed & grammar
