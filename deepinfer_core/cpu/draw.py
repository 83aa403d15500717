"""The draw on the host: the reference's tokens, with noise computed only where it can matter.

The reference takes ``argmax(logit - log E)`` over the whole vocabulary, with E from float64 logarithms. Two bounds
find the few tokens that can win, and only those get that exact noise:

* ``-log E`` lies in [-2.82, 22.88], since E comes from 32-bit words (api/sampling.py), so a token 26 below the best
  logit cannot win;
* with single-precision logarithms ``-log E`` is within 0.1 of the exact value (the worst case is a word next to
  2^32, where one unit in the last place of ``1 - u`` changes E by a factor of two), so a token whose approximate
  score is 0.25 below the best one cannot win.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch

from deepinfer_core.api import GREEDY_TEMPERATURE, PURPOSE_DRAW, BuildContext, SamplingBatch, SamplingRequest

from .philox import Words, philox4x32_10

Array = np.ndarray[Any, Any]

NOISE_RANGE = np.float32(26.0)
APPROXIMATION = np.float32(0.25)
ROUNDING = np.float32(2.0**-20)
"""Bounds hold for exact sums; a share of the best score more allows for rounding."""

_LARGEST_UNIFORM = np.float32(1 - 2.0**-24)
_WORD = 0xFFFFFFFF


@attrs.frozen
class _Stream:
    """Key and upper counter words of one row's noise: seed low and high, child, position low and high."""

    key: tuple[int, int]
    counter: tuple[int, int, int]

    def words(self, quads: Words) -> tuple[Words, ...]:
        """The four words of each group of four tokens."""
        return philox4x32_10((quads, *self.counter), self.key)


class Draw:
    """Greedy rows take the best token, others the seeded draw; lowest id on ties."""

    def __init__(self, request: SamplingRequest, context: BuildContext) -> None:
        self._quads: Words = np.arange(-(-request.vocab_size // 4), dtype=np.uint64)

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N, V]`` float32 (not changed) -> ``[N]`` int64; -1 where the row holds a NaN, a +inf or only -inf."""
        rows = logits.numpy()
        tokens = rows.argmax(axis=1)  # the first NaN of a row that has one
        best = rows[np.arange(len(rows)), tokens]
        usable = np.isfinite(best)
        tokens[~usable] = -1
        temperature = batch.state.temperature.numpy()[batch.slots.numpy()]
        for row in np.nonzero(usable & (temperature >= np.float32(GREEDY_TEMPERATURE)))[0].tolist():
            tokens[row] = self._sample(rows[row], best[row], _stream(batch, row))
        return torch.from_numpy(tokens)

    def _sample(self, logits: Array, best: Any, stream: _Stream) -> int:
        """Token of one row ``[V]`` whose best logit is finite."""
        ids = np.flatnonzero(logits >= best - NOISE_RANGE - abs(best) * ROUNDING)
        if len(ids) * 8 > len(logits):
            ids = self._likely(logits, stream)
        scores = logits[ids] - log_exponential(stream, ids)
        return int(ids[scores.argmax()])

    def _likely(self, logits: Array, stream: _Stream) -> Array:
        """Ids whose approximate score is next to the best one, ascending."""
        words = np.empty((len(self._quads), 4), np.float32)
        for column, part in enumerate(stream.words(self._quads)):
            words[:, column] = part
        flat = torch.from_numpy(words.reshape(-1)[: len(logits)])
        uniform = flat.mul_(2.0**-32).add_(2.0**-33).clamp_(max=float(_LARGEST_UNIFORM))
        scores = (torch.from_numpy(logits) - uniform.neg_().log1p_().neg_().log_()).numpy()
        best = scores.max()
        found: Array = np.flatnonzero(scores >= best - APPROXIMATION - abs(best) * ROUNDING)
        return found


def _stream(batch: SamplingBatch, row: int) -> _Stream:
    state, slot = batch.state, int(batch.slots[row])
    position = 3 * int(batch.positions[row]) + PURPOSE_DRAW
    return _Stream(
        (int(state.seed_lo[slot]), int(state.seed_hi[slot])),
        (int(state.child[slot]), position & _WORD, position >> 32),
    )


def log_exponential(stream: _Stream, ids: Array) -> Array:
    """log E of these tokens, float32, rounded exactly as the definition says."""
    words = np.stack(stream.words((ids // 4).astype(np.uint64)))[ids % 4, np.arange(len(ids))]
    uniform = np.minimum((2 * words + np.uint64(1)).astype(np.float32) * np.float32(2.0**-33), _LARGEST_UNIFORM)
    # torch's logarithms, since the definition rounds torch's float64 results.
    exponential = (-torch.log1p(-torch.from_numpy(uniform.astype(np.float64)))).to(torch.float32)
    return exponential.to(torch.float64).log().to(torch.float32).numpy()
