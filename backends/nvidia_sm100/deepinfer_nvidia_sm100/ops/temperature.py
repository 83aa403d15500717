"""``temperature`` and ``min_p``: two passes over the rows that have one, none over the others.

Floor: bytes, 8·N·V for each row that changes; here 12·N·V, since the row's best logit goes first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_core.api import GREEDY_TEMPERATURE, BuildContext, SamplingBatch, SamplingRequest

from .dependent import dependent, take_turn

PART, WARPS = 2048, 8


@triton.jit
def changes(value, GREEDY: tl.constexpr, MIN_P: tl.constexpr):
    """Whether a row with this parameter changes at all."""
    if MIN_P:
        return value > 0.0
    else:
        return (value >= GREEDY) & (value != 1.0)


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
        peak = tl.where(peak == float("-inf"), 0.0, peak)  # a row without a token stays one
        # The parts that were read last come first: those are still in the cache.
        token = (parts - 1 - tl.program_id(1)) * PART + tl.arange(0, PART)
        place = logits + row.to(tl.int64) * row_stride + token
        # Neither what is read last nor what is written stays in the cache, which has better use for its room.
        score = tl.load(place, mask=token < vocab_size, other=0.0, eviction_policy="evict_first") - peak
        if MIN_P:
            floor = tl.log(value.to(tl.float64)).to(tl.float32)
            tl.store(place, float("-inf"), mask=(token < vocab_size) & (score < floor))
        else:
            tl.store(place, tl.div_rn(score, value), mask=token < vocab_size, cache_modifier=".cs")


class _Stage:
    """Rows whose parameter leaves them alone are not even read."""

    MIN_P = False

    def __init__(self, request: SamplingRequest, context: BuildContext) -> None:
        pass

    def _apply(self, logits: torch.Tensor, batch: SamplingBatch, parameter: torch.Tensor) -> torch.Tensor:
        rows, vocab_size = logits.shape
        if rows == 0:
            return logits
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
