"""Device-resident sampling parameters and token history, one row per slot.

Everything here runs inside the closures given to the stream, in order with the steps that use it.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import attrs
import numpy as np
import torch

from deepinfer_core.api import Device, SamplingState, StageInfo

from .request import Sequence

_OFF = -1
HISTORY_STEP = 64
"""The history's width is a multiple of it, so that its rows begin alike: compilers make a kernel of its own else."""


@attrs.frozen
class SlotRow:
    """A sequence entering a slot, copied on the host when the step was planned."""

    slot: int
    tokens: np.ndarray[Any, Any]
    sequence: Sequence


class DeviceState:
    """Owns the :class:`SamplingState` of an engine and widens it as requests need more.

    ``spare``: places of the history past a request's longest length, for drafts.
    """

    def __init__(
        self, device: Device, slots: int, vocab_size: int, extra: SequenceOf[StageInfo] = (), *, spare: int = 0
    ) -> None:
        self._spare = spare
        self._off = {name: argument.off for info in extra for name, argument in info.arguments.items()}
        self.device = device
        self.vocab_size = vocab_size
        where = device.torch_device

        def full(value: float, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full((slots, *shape), value, dtype=dtype, device=where)

        self.sampling = SamplingState(
            history=full(0, 256, dtype=torch.int32),
            prompt_len=full(0),
            temperature=full(0.0, dtype=torch.float32),
            min_p=full(0.0, dtype=torch.float32),
            top_p=full(1.0, dtype=torch.float32),
            top_k=full(0),
            presence=full(0.0, dtype=torch.float32),
            frequency=full(0.0, dtype=torch.float32),
            repetition=full(1.0, dtype=torch.float32),
            seed_lo=full(0),
            seed_hi=full(0),
            child=full(0),
            min_end=full(0),
            stop_ids=full(_OFF, 4),
            bias_ids=full(_OFF, 1),
            bias_values=full(0.0, 1, dtype=torch.float32),
            bad_words=full(_OFF, 1, 1),
            allowed=None,
            extra={name: full(off, dtype=torch.float32) for name, off in self._off.items()},
        )

    def write(self, rows: SequenceOf[SlotRow]) -> None:
        """Fill the rows of sequences that enter their slots."""
        if not rows:
            return
        state = self.sampling
        slots = self._upload(np.array([r.slot for r in rows], np.int64))
        requests = [r.sequence.request for r in rows]
        params = [r.params for r in requests]

        def put(target: torch.Tensor, values: list[Any], dtype: Any) -> None:
            target[slots] = self._upload(np.array(values, dtype))

        put(state.prompt_len, [len(r.prompt_token_ids) for r in requests], np.int64)
        put(state.temperature, [p.temperature for p in params], np.float32)
        # Off for greedy rows, so that their processed logits do not depend on which stages their neighbours need.
        put(state.min_p, [0.0 if p.is_greedy else p.min_p for p in params], np.float32)
        put(state.top_p, [1.0 if p.is_greedy else p.top_p for p in params], np.float32)
        put(state.top_k, [0 if p.is_greedy else p.top_k for p in params], np.int64)
        put(state.presence, [p.presence_penalty for p in params], np.float32)
        put(state.frequency, [p.frequency_penalty for p in params], np.float32)
        put(state.repetition, [p.repetition_penalty for p in params], np.float32)
        put(state.seed_lo, [r.seed & 0xFFFFFFFF for r in requests], np.int64)
        put(state.seed_hi, [r.seed >> 32 for r in requests], np.int64)
        put(state.child, [r.sequence.child for r in rows], np.int64)
        put(state.min_end, [len(r.prompt_token_ids) + r.params.min_tokens for r in requests], np.int64)
        for name, off in self._off.items():
            put(state.extra[name], [dict(p.extra_args).get(name, off) for p in params], np.float32)
        state.stop_ids = self._put_ragged(state.stop_ids, slots, [r.eos_token_ids for r in requests])
        biases = [p.logit_bias for p in params]
        state.bias_ids = self._put_ragged(state.bias_ids, slots, [[i for i, _ in b] for b in biases])
        state.bias_values = self._put_ragged(state.bias_values, slots, [[v for _, v in b] for b in biases], 0.0)
        self._put_bad_words(slots, [r.bad_word_ids for r in requests])
        self._put_allowed(slots, [p.allowed_token_ids for p in params])
        self._put_history(rows)

    def _upload(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return self.device.upload(array)

    def _put_ragged(
        self, target: torch.Tensor, slots: torch.Tensor, lists: SequenceOf[SequenceOf[Any]], fill: float = _OFF
    ) -> torch.Tensor:
        target = _widened(target, _roomy(max(map(len, lists))), fill)
        width = target.shape[1]
        rows = np.array([[*items, *[fill] * (width - len(items))] for items in lists])
        target[slots] = self._upload(rows).to(target.dtype)
        return target

    def _put_bad_words(self, slots: torch.Tensor, words: SequenceOf[SequenceOf[SequenceOf[int]]]) -> None:
        state = self.sampling
        count = max(1, *map(len, words))
        length = max(1, *(len(w) for row in words for w in row), state.bad_words.shape[2])
        if count > state.bad_words.shape[1] or length > state.bad_words.shape[2]:
            old = state.bad_words
            shape = (old.shape[0], max(_roomy(count), old.shape[1]), _roomy(length))
            grown = torch.full(shape, _OFF, dtype=old.dtype, device=old.device)
            grown[:, : old.shape[1], shape[2] - old.shape[2] :] = old
            state.bad_words = grown
        table = np.full((len(words), *state.bad_words.shape[1:]), _OFF, np.int64)
        for i, row in enumerate(words):
            for j, word in enumerate(row):
                table[i, j, table.shape[2] - len(word) :] = word
        state.bad_words[slots] = self._upload(table)

    def _put_allowed(self, slots: torch.Tensor, lists: SequenceOf[SequenceOf[int] | None]) -> None:
        state = self.sampling
        if state.allowed is None and all(ids is None for ids in lists):
            return
        words = -(-self.vocab_size // 32)
        if state.allowed is None:
            everything = torch.full((state.top_k.shape[0], words), -1, dtype=torch.int32)
            state.allowed = everything.to(self.device.torch_device)
        masks = np.zeros((len(lists), words * 32), bool)
        for mask, ids in zip(masks, lists, strict=True):
            mask[slice(None) if ids is None else list(ids)] = True
        packed = np.packbits(masks, axis=1, bitorder="little").view(np.int32)
        state.allowed[slots] = self._upload(packed)

    def _put_history(self, rows: SequenceOf[SlotRow]) -> None:
        state = self.sampling
        need = max(r.sequence.request.max_len for r in rows) + self._spare
        state.history = _widened(state.history, -(-need // HISTORY_STEP) * HISTORY_STEP, 0, double=True)
        for row in rows:
            state.history[row.slot, : len(row.tokens)] = self._upload(row.tokens)


def _roomy(count: int) -> int:
    """The next power of four: operators may be compiled for a width, so there shall be few of them."""
    width = 1
    while width < count:
        width *= 4
    return width


def _widened(table: torch.Tensor, width: int, fill: float, *, double: bool = False) -> torch.Tensor:
    """``[S, have]`` padded on the right to at least ``width`` columns."""
    have = table.shape[1]
    if width <= have:
        return table
    grown = torch.full(
        (table.shape[0], max(width, 2 * have if double else 0)), fill, dtype=table.dtype, device=table.device
    )
    grown[:, :have] = table
    return grown
