"""The draw: greedy rows take the best token, others ``argmax(logits - log E)``, with E as the core defines it.

E takes float64 logarithms, which few tokens need. One launch finds, for each part of a row, the best score by single-
precision logarithms, which are within 0.1 of the exact ones; a second computes exact scores for those parts only whose
best lies within 0.25 of the row's best, most often one. Philox is computed once for four tokens.

Floor: bytes, 4·N·V: the logits once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_core.api import GREEDY_TEMPERATURE, PURPOSE_DRAW, BuildContext, SamplingBatch, SamplingRequest

from .dependent import dependent, take_turn

PART = 1024
"""Tokens of one part of a row."""
SLACK = 0.25
ROUNDING = 2.0**-20
"""The bound holds for exact sums; a share of the best score more allows for rounding."""


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 (Salmon et al. 2011): four words of a counter and a key, all uint32."""
    for _ in tl.static_range(10):
        product0 = c0.to(tl.uint64) * 0xD2511F53  # one instruction gives both halves
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = product1.to(tl.uint32)
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = product0.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def words(first, seed_lo, seed_hi, child, stream, COUNT: tl.constexpr):
    """The words w (uint32) of COUNT tokens from ``first`` on, a multiple of 4."""
    quad = (tl.arange(0, COUNT // 4) + first // 4).to(tl.uint32)
    zero = quad * 0
    low = (stream & 0xFFFFFFFF).to(tl.uint32) + zero
    high = (stream >> 32).to(tl.uint32) + zero
    w0, w1, w2, w3 = philox(
        quad, child.to(tl.uint32) + zero, low, high, seed_lo.to(tl.uint32) + zero, seed_hi.to(tl.uint32) + zero
    )
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def uniform_of(word):
    """``(w + 0.5) * 2^-32`` rounded once to float32, capped below 1."""
    value = (word.to(tl.uint64) * 2 + 1).to(tl.float32) * (2.0**-33)
    return tl.minimum(value, 1.0 - 2.0**-24)


@triton.jit
def noise_of(uniform):
    """``log E`` as defined: float64 logarithms, each rounded to float32. ``1 - u`` is exact in float64."""
    exponential = (-tl.log(1.0 - uniform.to(tl.float64))).to(tl.float32)
    return tl.log(exponential.to(tl.float64)).to(tl.float32)


@triton.jit
def scan_kernel(
    logits,
    best,
    slots,
    positions,
    temperature,
    seed_lo,
    seed_hi,
    child,
    vocab_size,
    row_stride,
    GREEDY: tl.constexpr,
    PURPOSE: tl.constexpr,
    PART: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (N, parts): the best score of a part, exact for greedy rows; +inf if it holds a NaN or +inf."""
    take_turn(DEPENDENT)
    row = tl.program_id(0)
    first = tl.program_id(1) * PART
    token = first + tl.arange(0, PART)
    score = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=token < vocab_size, other=float("-inf"))
    broken = tl.max(((score != score) | (score == float("inf"))).to(tl.int32), axis=0)
    slot = tl.load(slots + row)
    here = tl.max(score, axis=0)
    # Parts that were cut away whole need no noise.
    if (tl.load(temperature + slot) >= GREEDY) & (here != float("-inf")):
        stream = tl.load(positions + row) * 3 + PURPOSE
        word = words(first, tl.load(seed_lo + slot), tl.load(seed_hi + slot), tl.load(child + slot), stream, PART)
        u = tl.minimum(word.to(tl.float32) * (2.0**-32) + 2.0**-33, 1.0 - 2.0**-24)
        small = u * (1.0 + u * (0.5 + u * 0.33333334))  # -log(1 - u) where 1 - u would round
        score = score - tl.log(tl.where(u < 0.01, small, -tl.log(1.0 - u)))
    top = tl.max(score, axis=0)
    tl.store(best + row * tl.num_programs(1) + tl.program_id(1), tl.where(broken > 0, float("inf"), top))


@triton.jit
def pick_kernel(
    logits,
    best,
    out,
    slots,
    positions,
    temperature,
    seed_lo,
    seed_hi,
    child,
    vocab_size,
    row_stride,
    parts,
    slack,
    rounding,
    GREEDY: tl.constexpr,
    PURPOSE: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (N,): exact scores of the parts that can hold the winner; lowest id on ties, -1 for a broken row."""
    take_turn(DEPENDENT)
    row = tl.program_id(0)
    number = tl.arange(0, PARTS)
    tops = tl.load(best + row * parts + number, mask=number < parts, other=float("-inf"))
    limit = tl.max(tops, axis=0)
    winner = tl.full((), -1, tl.int64)
    if (limit != float("inf")) & (limit != float("-inf")):
        slot = tl.load(slots + row)
        sampled = tl.load(temperature + slot) >= GREEDY
        if sampled:
            limit = limit - slack - tl.abs(limit) * rounding
        top = tl.full((), float("-inf"), tl.float32)
        part = tl.min(tl.where(tops >= limit, number, PARTS), axis=0)
        while part < PARTS:
            first = part * PART
            token = first + tl.arange(0, PART)
            inside = token < vocab_size
            score = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=inside, other=float("-inf"))
            if sampled:
                stream = tl.load(positions + row) * 3 + PURPOSE
                word = words(
                    first, tl.load(seed_lo + slot), tl.load(seed_hi + slot), tl.load(child + slot), stream, PART
                )
                score = score - noise_of(uniform_of(word))
            here = tl.max(score, axis=0)
            if here > top:
                top = here
                winner = tl.min(tl.where(score == here, token, 2147483647), axis=0).to(tl.int64)
            part = tl.min(tl.where((tops >= limit) & (number > part), number, PARTS), axis=0)
    tl.store(out + row, winner)


class Draw:
    """Greedy rows take the best token, others the seeded draw; lowest id on ties."""

    def __init__(self, request: SamplingRequest, context: BuildContext) -> None:
        pass

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N, V]`` float32 (not changed) -> ``[N]`` int64; -1 where the row holds a NaN, a +inf or only -inf."""
        rows, vocab_size = logits.shape
        out = torch.empty(rows, dtype=torch.int64, device=logits.device)
        if rows == 0:
            return out
        state = batch.state
        parts = triton.cdiv(vocab_size, PART)
        best = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
        of_row = (batch.slots, batch.positions, state.temperature, state.seed_lo, state.seed_hi, state.child)
        fixed = {"GREEDY": GREEDY_TEMPERATURE, "PURPOSE": PURPOSE_DRAW, "PART": PART, **dependent(logits)}
        scan_kernel[(rows, parts)](logits, best, *of_row, vocab_size, logits.stride(0), **fixed, num_warps=4)
        pick_kernel[(rows,)](
            logits,
            best,
            out,
            *of_row,
            vocab_size,
            logits.stride(0),
            parts,
            SLACK,
            ROUNDING,
            **fixed,
            PARTS=triton.next_power_of_2(parts),
            num_warps=4,
        )
        return out
