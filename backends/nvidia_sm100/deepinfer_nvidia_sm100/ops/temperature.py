"""``temperature`` and ``min_p``: rows that have one are compared with their best logit, the others not even read.

Floor: bytes, 8·N·V for each row that changes. The row's best logit goes first, so that it is read twice, the second
time from the second-level cache: by a second kernel where it holds all rows, see :mod:`.lagging` where it does not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_core.api import GREEDY_TEMPERATURE, BuildContext, SamplingBatch, SamplingRequest

from . import lagging
from .by_best import changes, put
from .dependent import dependent, take_turn

PART, WARPS = 2048, 8
MANY, WIDE = 96, 65536
"""Rows, and tokens of each, from which on the second-level cache does not hold them all until they are read again."""


@triton.jit
def peak_kernel(
    logits,
    peaks,
    slots,
    parameter,
    vocab_size,
    row_stride,
    GREEDY: tl.constexpr,
    MIN_P: tl.constexpr,
    PART: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (N, parts): the largest logit of each part."""
    take_turn(DEPENDENT)
    row = tl.program_id(0)
    if changes(tl.load(parameter + tl.load(slots + row)), GREEDY, MIN_P):
        token = tl.program_id(1) * PART + tl.arange(0, PART)
        value = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=token < vocab_size, other=float("-inf"))
        tl.store(peaks + row * tl.num_programs(1) + tl.program_id(1), tl.max(value, axis=0))


@triton.jit
def apply_kernel(
    logits,
    peaks,
    slots,
    parameter,
    vocab_size,
    row_stride,
    GREEDY: tl.constexpr,
    MIN_P: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (N, parts), in place."""
    take_turn(DEPENDENT)
    row = tl.program_id(0)
    value = tl.load(parameter + tl.load(slots + row))
    if changes(value, GREEDY, MIN_P):
        part = tl.arange(0, PARTS)
        parts = tl.num_programs(1)
        peak = tl.max(tl.load(peaks + row * parts + part, mask=part < parts, other=float("-inf")), axis=0)
        # The parts that were read last come first: those are still in the cache.
        token = (parts - 1 - tl.program_id(1)) * PART + tl.arange(0, PART)
        place = logits + row.to(tl.int64) * row_stride + token
        inside = token < vocab_size
        logit = tl.load(place, mask=inside, other=0.0, eviction_policy="evict_first")
        put(place, inside, logit, peak, value, MIN_P)


class _Stage:
    """Rows whose parameter leaves them alone are not even read."""

    MIN_P = False

    def __init__(self, request: SamplingRequest, context: BuildContext) -> None:
        pass

    def _apply(self, logits: torch.Tensor, batch: SamplingBatch, parameter: torch.Tensor) -> torch.Tensor:
        rows, vocab_size = logits.shape
        if rows == 0:
            return logits
        if rows >= MANY and vocab_size >= WIDE:
            return lagging.apply(logits, batch.slots, parameter, GREEDY_TEMPERATURE, min_p=self.MIN_P)
        parts = triton.cdiv(vocab_size, PART)
        peaks = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
        arguments = (logits, peaks, batch.slots, parameter, vocab_size, logits.stride(0))
        fixed = {"GREEDY": GREEDY_TEMPERATURE, "MIN_P": self.MIN_P, "PART": PART, **dependent(logits)}
        peak_kernel[(rows, parts)](*arguments, **fixed, num_warps=WARPS)
        apply_kernel[(rows, parts)](*arguments, **fixed, PARTS=triton.next_power_of_2(parts), num_warps=WARPS)
        return logits


class Temperature(_Stage):
    """``(logits - max) / temperature``; rows at exactly 1, and greedy rows, stay as they are."""

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N, V]`` float32, changed in place."""
        return self._apply(logits, batch, batch.state.temperature)


class MinP(_Stage):
    """Removes tokens less likely than ``min_p`` times the likeliest."""

    MIN_P = True

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N, V]`` float32, changed in place."""
        return self._apply(logits, batch, batch.state.min_p)
