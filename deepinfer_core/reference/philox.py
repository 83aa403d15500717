"""Philox4x32-10 (Salmon et al. 2011, 'Parallel random numbers: as easy as 1, 2, 3') and the noise of a draw.

Words are unsigned 32-bit values held in int64 tensors. No product exceeds 2^49, so nothing overflows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LARGEST_UNIFORM = 1 - 2.0**-24


def _multiply(word: torch.Tensor, constant: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of ``word * constant``, from the two 16-bit halves of the constant."""
    upper = word * (constant >> 16)
    lower = word * (constant & 0xFFFF)
    high = (upper + (lower >> 16)) >> 16
    low = (((upper & 0xFFFF) << 16) + lower) & _WORD
    return high, low


def philox4x32_10(counter: Sequence[torch.Tensor], key: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Four output words of a counter of four words and a key of two.

    All are int64 tensors of values in ``[0, 2^32)`` whose shapes broadcast together; so are the four results.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def noise_words(
    seed_lo: torch.Tensor,
    seed_hi: torch.Tensor,
    child: torch.Tensor,
    positions: torch.Tensor,
    purpose: int,
    vocab_size: int,
) -> torch.Tensor:
    """The word ``w`` of every token: ``[N]`` int64 arguments -> ``[N, vocab_size]`` int64.

    Key: seed, low word first. Counter: token_id div 4, child, low and high word of 3 * position + purpose.
    """
    count = -(-vocab_size // 4)
    quads = torch.arange(count, device=positions.device)
    stream = 3 * positions + purpose
    counter = (quads, child[:, None], (stream & _WORD)[:, None], (stream >> 32)[:, None])
    words = philox4x32_10(counter, (seed_lo[:, None], seed_hi[:, None]))
    return torch.stack(words, dim=-1).reshape(positions.shape[0], 4 * count)[:, :vocab_size]


def exponential(words: torch.Tensor) -> torch.Tensor:
    """``E = -log1p(-(w + 0.5) * 2^-32)``, float32, of words ``w`` (int64, any shape).

    ``2w + 1`` rounds to float32 once and scaling by 2^-33 is exact. The logarithm is taken in float64 and rounded,
    since float32 logarithms of two libraries, or of two lanes of one library, need not agree in the last bit.
    """
    uniform = ((2 * words + 1).to(torch.float32) * 2.0**-33).clamp(max=_LARGEST_UNIFORM)
    return (-torch.log1p(-uniform.to(torch.float64))).to(torch.float32)


def log_exponential(words: torch.Tensor) -> torch.Tensor:
    """``log E`` of words, float32: the float64 logarithm of the float32 E, rounded."""
    return exponential(words).to(torch.float64).log().to(torch.float32)
