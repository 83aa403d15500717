"""What stays of thousands of tokens, a list's or a whole row's, by reading them again for each guess."""

from __future__ import annotations

import triton
import triton.language as tl

from .ranks import exact_scores, logit_of, mass_of, rank_of, reached, tempered, token_of


@triton.jit
def piece(row_logits, listed, start, size, peak, heat, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """Logits as the temperature leaves them, tokens, and ranks, negative for nothing."""
    place = start + tl.arange(0, BLOCK)
    if LISTED:
        given = tl.load(listed + place, mask=place < size, other=-1)
        token = token_of(given)
        logit = logit_of(given)
        there = given >= 0
    else:
        token = place
        logit = tl.load(row_logits + place, mask=place < size, other=float("-inf"))
        there = logit > float("-inf")
    value = tempered(logit, peak, heat)
    return value, token, tl.where(there, rank_of(value, token), -1)


@triton.jit
def held(row_logits, listed, size, least, floor, peak, heat, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """Number and mass of the tokens whose rank is at least both."""
    counts = tl.zeros((BLOCK,), tl.int32)
    masses = tl.zeros((BLOCK,), tl.int64)
    top = tempered(peak, peak, heat)
    bound = tl.maximum(least, floor)
    for start in range(0, size, BLOCK):
        value, _, rank = piece(row_logits, listed, start, size, peak, heat, LISTED, BLOCK)
        there = rank >= bound
        counts += there.to(tl.int32)
        masses += tl.where(there, mass_of(value, top), 0)
    return tl.sum(counts, axis=0), tl.sum(masses, axis=0)


@triton.jit
def settle_long(
    row_logits, listed, size, k, p, above, total, peak, heat, slot, position, seed_lo, seed_hi, child,
    PURPOSE: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr, DRAW: tl.constexpr,
):  # fmt: skip
    """As :func:`.ranks.settle`. Of a whole row, the total is its own mass."""
    low = tl.full((), 0, tl.int64)
    end = rank_of(tempered(peak, peak, heat), tl.full((), 0, tl.int32)) + 1
    count, mass = held(row_logits, listed, size, low, low, peak, heat, LISTED, BLOCK)
    if (k > 0) & (k < count):
        high = end
        while (count > k) & (high - low > 1):
            middle = low + (high - low) // 2
            here, mass_here = held(row_logits, listed, size, middle, low, peak, heat, LISTED, BLOCK)
            if here >= k:
                low = middle
                count = here
                mass = mass_here
            else:
                high = middle
    enough = size > 0
    if p < 1.0:
        if (k > 0) | (LISTED == 0):
            total = mass.to(tl.float64)
        enough = reached(above + mass, total, p)
        high = end
        more = tl.full((), 0, tl.int32)
        while enough & (count - more > 1) & (high - low > 1):
            middle = low + (high - low) // 2
            here, mass_here = held(row_logits, listed, size, middle, low, peak, heat, LISTED, BLOCK)
            if reached(above + mass_here, total, p):
                low = middle
                count = here
            else:
                high = middle
                more = here
    best = tl.full((), float("-inf"), tl.float32)
    winner = tl.full((), 2147483647, tl.int32)
    if DRAW:
        for start in range(0, size, BLOCK):
            value, token, rank = piece(row_logits, listed, start, size, peak, heat, LISTED, BLOCK)
            kept = rank >= low
            score = exact_scores(value, token, slot, position, seed_lo, seed_hi, child, PURPOSE)
            score = tl.where(kept, score, float("-inf"))
            here = tl.max(score, axis=0)
            first = tl.min(tl.where(kept & (score == here), token, 2147483647), axis=0)
            if (here > best) | ((here == best) & (first < winner)):  # lists are in no order
                best = here
                winner = first
    return low, enough, best, winner
