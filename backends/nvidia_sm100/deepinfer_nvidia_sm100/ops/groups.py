"""Groups of tokens: whose largest logits and bounds of scores the first reading writes down."""

from __future__ import annotations

import triton
import triton.language as tl

from .noise import noise_of, uniform_of
from .ranks import BOUND_SHIFT, slack_of, tempered, word_of

PART = tl.constexpr(4096)
"""Tokens of one part of a row."""
GROUP = 64
"""Tokens of a group; twice as many where a row has more than 2,048 such groups."""
LOOK = tl.constexpr(1024)
"""Tokens of a part that are looked at together."""
RUNS = tl.constexpr(8)
"""Pieces that a group has, each of neighbours, equally far apart: a thread or two read all of them."""


@triton.jit
def token_at(group, place, GROUP: tl.constexpr):
    """The id of a group's token."""
    LENGTH: tl.constexpr = GROUP // RUNS
    PER_PART: tl.constexpr = PART // GROUP
    first = group // PER_PART * PART + group % PER_PART * LENGTH
    return first + place // LENGTH * (PART // RUNS) + place % LENGTH


@triton.jit
def best_of_groups(
    row_logits, row_bounds, groups, peak, heat, sampled, slot, position, seed_lo, seed_hi, child, vocab_size,
    PURPOSE: tl.constexpr, GROUP: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """The token with the best exact score, or of a row that is not sampled the one with the best logit.

    ``row_bounds [groups]``: of scores, as the survey writes them, or of logits.
    """
    number = tl.arange(0, ALL)
    bound = tl.load(row_bounds + number, mask=number < groups, other=float("-inf"))
    base = tl.where(heat == 1.0, 0.0, peak)
    slack = slack_of(peak, heat)
    best = tl.full((), float("-inf"), tl.float32)
    winner = tl.full((), 2147483647, tl.int32)
    ahead = tl.max(bound, axis=0)
    if sampled == 0:
        # Bounds are exact: the token is in the first part that has the largest.
        part = tl.min(tl.where(bound == ahead, number, ALL), axis=0) // (PART // GROUP)
        for start in range(0, PART, LOOK):
            token = part * PART + start + tl.arange(0, LOOK)
            value = tl.load(row_logits + token, mask=token < vocab_size, other=float("-inf"))
            winner = tl.minimum(winner, tl.min(tl.where(value == ahead, token, 2147483647), axis=0))
    again = (sampled != 0) & (ahead > float("-inf"))
    while again:
        group = tl.min(tl.where(bound == ahead, number, ALL), axis=0)
        token = token_at(group, tl.arange(0, GROUP), GROUP)
        value = tl.load(row_logits + token, mask=token < vocab_size, other=float("-inf"))
        kept = value > float("-inf")
        word = word_of(token, slot, position, seed_lo, seed_hi, child, PURPOSE)
        score = tempered(value, peak, heat) - noise_of(uniform_of(word))
        score = tl.where(kept, score, float("-inf"))
        here = tl.max(score, axis=0)
        first = tl.min(tl.where(kept & (score == here), token, 2147483647), axis=0)
        if (here > best) | ((here == best) & (first < winner)):
            best = here
            winner = first
        bound = tl.where(number == group, float("-inf"), bound)
        ahead = tl.max(bound, axis=0)
        again = (ahead > float("-inf")) & ((ahead - base) / heat + BOUND_SHIFT >= best - slack)
    return best, winner
