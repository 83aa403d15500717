"""What stays of thousands of tokens, a list's or a whole row's, by reading them again for each guess."""

from __future__ import annotations

import triton
import triton.language as tl

from .lists import best_kept, entries, opened
from .ranks import mass_of, rank_of, reached, tempered


@triton.jit
def piece(row_logits, listed, found, start, size, peak, heat, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK tokens of the row, or of each region of the list, as :func:`.lists.opened`."""
    if LISTED:
        return opened(entries(listed, found, start, BLOCK), peak, heat)
    else:
        token = start + tl.arange(0, BLOCK)
        logit = tl.load(row_logits + token, mask=token < size, other=float("-inf"))
        value = tempered(logit, peak, heat)
        return value, token, tl.where(logit > float("-inf"), rank_of(value, token), -1)


@triton.jit
def held(row_logits, listed, found, size, least, floor, peak, heat, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """Number and mass of the tokens whose rank is at least both."""
    count = tl.full((), 0, tl.int32)
    mass = tl.full((), 0, tl.int64)
    top = tempered(peak, peak, heat)
    bound = tl.maximum(least, floor)
    for start in range(0, size, BLOCK):
        value, _, rank = piece(row_logits, listed, found, start, size, peak, heat, LISTED, BLOCK)
        there = rank >= bound
        count += tl.sum(there.to(tl.int32), axis=0)
        mass += tl.sum(tl.where(there, mass_of(value, top), 0), axis=0)
    return count, mass


@triton.jit
def settle_long(
    row_logits, listed, found, size, k, p, above, total, peak, heat, slot, position, seed_lo, seed_hi, child,
    PURPOSE: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr, DRAW: tl.constexpr,
):  # fmt: skip
    """The least rank that stays, whether top-p's limit is reached, best score and its token.

    ``size``: of the row, or of the list's longest region. Of a whole row, the total is its own mass.
    """
    low = tl.full((), 0, tl.int64)
    end = rank_of(tempered(peak, peak, heat), tl.full((), 0, tl.int32)) + 1
    count, mass = held(row_logits, listed, found, size, low, low, peak, heat, LISTED, BLOCK)
    if (k > 0) & (k < count):
        high = end
        while (count > k) & (high - low > 1):
            middle = low + (high - low) // 2
            here, mass_here = held(row_logits, listed, found, size, middle, low, peak, heat, LISTED, BLOCK)
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
            here, mass_here = held(row_logits, listed, found, size, middle, low, peak, heat, LISTED, BLOCK)
            if (here > 0) & reached(above + mass_here, total, p):  # the best stays even at a limit of nothing
                low = middle
                count = here
            else:
                high = middle
                more = here
    best = tl.full((), float("-inf"), tl.float32)
    winner = tl.full((), 2147483647, tl.int32)
    if DRAW:
        for start in range(0, size, BLOCK):
            value, token, rank = piece(row_logits, listed, found, start, size, peak, heat, LISTED, BLOCK)
            best, winner = best_kept(
                value, token, rank, low, best, winner, slot, position, seed_lo, seed_hi, child, PURPOSE
            )
    return low, enough, best, winner
