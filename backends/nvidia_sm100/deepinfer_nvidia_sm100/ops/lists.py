"""Lists of what can stay of a row, logits and tokens, and finding in them what does.

An entry holds a logit's bits, as it came, above its token. A list lies in REGIONS pieces of LANES entries;
``found [REGIONS]`` says how many of each are real.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .noise import bound_of, noise_of, uniform_of
from .ranks import least_by_count, least_by_mass, mass_of, rank_of, reached, tempered, word_of

REGIONS, LANES = tl.constexpr(16), tl.constexpr(1024)
NONE = tl.constexpr(2147483647)


@triton.jit
def entry_of(logit, token):
    return (logit.to(tl.int32, bitcast=True).to(tl.int64) << 32) | token.to(tl.int64)


@triton.jit
def place_of(number):
    """Where entry ``number`` of a list goes that is filled evenly."""
    return number % REGIONS * LANES + number // REGIONS


@triton.jit
def put(listed, place, logit, token, real, most):
    """Writes entries down, those before ``most`` places."""
    tl.store(listed + place, entry_of(logit, token), mask=(real > 0) & (place < most))


@triton.jit
def entries(listed, found, start, WIDTH: tl.constexpr):
    """WIDTH entries of each region, from ``start`` on; -1 where there is none."""
    flat = tl.arange(0, REGIONS * WIDTH)
    entry = start + flat % WIDTH
    real = entry < tl.load(found + flat // WIDTH)
    return tl.load(listed + flat // WIDTH * LANES + entry, mask=real, other=-1)


@triton.jit
def opened(given, peak, heat):
    """Logits as the temperature leaves them, tokens, and ranks, negative for nothing."""
    token = (given & 0x7FFFFFFF).to(tl.int32)
    value = tempered((given >> 32).to(tl.int32).to(tl.float32, bitcast=True), peak, heat)
    return value, token, tl.where(given == -1, -1, rank_of(value, token))


@triton.jit
def best_kept(value, token, rank, low, best, winner, slot, position, seed_lo, seed_hi, child, PURPOSE: tl.constexpr):
    """The best exact score, and its token, of what stays, beside a best that is known."""
    kept = rank >= low
    word = word_of(token, slot, position, seed_lo, seed_hi, child, PURPOSE)
    bound = tl.max(tl.where(kept, value + bound_of(word), float("-inf")), axis=0)
    if bound >= best - (1e-4 + tl.abs(best) * (2.0**-20)):
        score = tl.where(kept, value - noise_of(uniform_of(word)), float("-inf"))
        here = tl.max(score, axis=0)
        first = tl.min(tl.where(kept & (score == here), token, NONE), axis=0)
        if (here > best) | ((here == best) & (first < winner)):
            best = here
            winner = first
    return best, winner


@triton.jit
def settle_few(
    listed, count, k, p, total, peak, heat, slot, position, seed_lo, seed_hi, child,
    PURPOSE: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr, DRAW: tl.constexpr,
):  # fmt: skip
    """The least rank that stays of up to SIZE tokens, and the token drawn: each against each."""
    number = tl.arange(0, SIZE)
    given = tl.load(listed + place_of(number), mask=number < count, other=-1)
    value, token, rank = opened(given, peak, heat)
    top = tempered(peak, peak, heat)
    before = tl.zeros((SIZE,), tl.int64)
    for start in range(0, count, STEP):
        other = start + tl.arange(0, STEP)
        its_value, _, its_rank = opened(tl.load(listed + place_of(other), mask=other < count, other=-1), peak, heat)
        each = mass_of(its_value, top) + (1 << 48)
        before += tl.sum(tl.where(its_rank[None, :] > rank[:, None], each[None, :], 0), axis=1)
    stays = rank >= 0
    if k > 0:
        stays = stays & ((before >> 48) < k)
    if p < 1.0:
        if k > 0:
            total = tl.sum(tl.where(stays, mass_of(value, top), 0), axis=0).to(tl.float64)
        ahead = before & ((1 << 48) - 1)
        stays = stays & ((reached(ahead, total, p) == 0) | (before == 0))
    low = tl.min(tl.where(stays, rank, 0x7FFFFFFFFFFFFFFF), axis=0)
    winner = tl.full((), NONE, tl.int32)
    if DRAW:
        best = tl.full((), float("-inf"), tl.float32)
        _, winner = best_kept(value, token, rank, low, best, winner, slot, position, seed_lo, seed_hi, child, PURPOSE)
    return low, winner


@triton.jit
def least_of(given, k, p, above, total, low, peak, heat):
    """The least rank that stays of a list in registers, none of it below ``low``; whether top-p's limit is reached."""
    value, _, rank = opened(given, peak, heat)
    high = tl.max(rank, axis=0) + 1
    enough = high >= 0
    count = tl.sum((rank >= 0).to(tl.int32), axis=0)
    if (k > 0) & (k < count):
        low = least_by_count(rank, low, high, k, 0)
    if p < 1.0:
        mass = tl.where(rank >= low, mass_of(value, tempered(peak, peak, heat)), 0)
        if k > 0:
            total = tl.sum(mass, axis=0).to(tl.float64)
        low, enough = least_by_mass(rank, mass, low, high, above, total, p, 0)
    return low, enough


@triton.jit
def draw_listed(
    listed, found, most, low, best, winner, peak, heat, slot, position, seed_lo, seed_hi, child, PURPOSE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Best score, and its token, of what stays of a list whose longest region has ``most`` entries, and of what is
    known."""
    for start in range(0, most, WIDTH):
        value, token, rank = opened(entries(listed, found, start, WIDTH), peak, heat)
        best, winner = best_kept(
            value, token, rank, low, best, winner, slot, position, seed_lo, seed_hi, child, PURPOSE
        )
    return best, winner
