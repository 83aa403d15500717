"""What the toys must answer, worked out without the engine: plain Python and numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

HASH_ROWS = 8191

Array = np.ndarray[Any, Any]


def mix(token: Any, place: Any) -> Any:
    """A number below 2^20 that depends on a token and its place; works on ints, arrays and tensors."""
    value = ((token + 1) * 48271 + (place + 1) * 69621 + (token + 1) * (place + 1) * 16807) % 2147483647
    value = (value * value) % 2147483647
    return value % 1048573


def hash_logits(vocab_size: int) -> Array:
    """``[HASH_ROWS, vocab_size]`` float32, fixed."""
    values: Array = np.random.default_rng(20).normal(0.0, 2.0, (HASH_ROWS, vocab_size)).astype(np.float32)
    return values


def hash_row(tokens: Sequence[int], windows: Sequence[int | None]) -> int:
    """Row of :func:`hash_logits` after ``tokens``, for cache groups with these windows, in order."""
    total = 0
    for weight, window in enumerate(windows, start=1):
        first = 0 if window is None else max(0, len(tokens) - window)
        total += weight * sum(mix(token, place) for place, token in enumerate(tokens) if place >= first)
    return total % HASH_ROWS


def count_tokens(prompt: Sequence[int], new_tokens: int, modulus: int) -> list[int]:
    """COUNT's answer."""
    return [(prompt[-1] + 1 + i) % modulus for i in range(new_tokens)]


class HashOracle:
    """PREFIXHASH's answers."""

    def __init__(self, vocab_size: int, windows: Sequence[int | None]) -> None:
        self.vocab_size = vocab_size
        self.windows = windows
        self.table = hash_logits(vocab_size)

    def logits(self, tokens: Sequence[int]) -> Array:
        """``[V]`` float32 after ``tokens``."""
        row: Array = self.table[hash_row(tokens, self.windows)]
        return row

    def tokens(
        self,
        prompt: Sequence[int],
        new_tokens: int,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        child: int = 0,
        stop_ids: Sequence[int] = (),
        min_tokens: int = 0,
        presence: float = 0.0,
    ) -> list[int]:
        """Output ids, up to and including a stop id. Presence penalty on output tokens."""
        known = list(prompt)
        for _ in range(new_tokens):
            scores = self.logits(known).copy()
            for token in set(known[len(prompt) :]):
                scores[token] -= np.float32(presence)
            known.append(draw(scores, temperature, seed, child, len(known)))
            if known[-1] in stop_ids and len(known) - len(prompt) >= min_tokens:
                break
        return known[len(prompt) :]


def draw(scores: Array, temperature: float, seed: int, child: int, position: int) -> int:
    """The token at ``position`` under the published rule: argmax, or Gumbel-argmax with Philox noise."""
    if temperature == 0.0:
        return int(scores.argmax())
    scaled = scores if temperature == 1.0 else (scores - scores.max()) / np.float32(temperature)
    return int((scaled - log_noise(len(scores), seed, child, position)).argmax())


def log_noise(vocab_size: int, seed: int, child: int, position: int) -> Array:
    """``log E`` of every token, float32."""
    quads = -(-vocab_size // 4)
    stream = 3 * position
    counter = [np.arange(quads, dtype=np.uint64), *(np.full(quads, v, np.uint64) for v in _words(child, stream))]
    key = [seed % 2**32, (seed % 2**64) >> 32]
    words = np.stack(_philox(counter, key), axis=1).reshape(-1)[:vocab_size]
    uniform = np.minimum(((words.astype(np.float64) + 0.5) * 2.0**-32).astype(np.float32), np.float32(1 - 2.0**-24))
    noise: Array = np.log((-np.log1p(-uniform.astype(np.float64))).astype(np.float32).astype(np.float64))
    return noise.astype(np.float32)


def _words(child: int, stream: int) -> tuple[int, int, int]:
    return child, stream % 2**32, stream >> 32


def _philox(counter: list[Array], key: list[int]) -> list[Array]:
    mask, shift = np.uint64(2**32 - 1), np.uint64(32)
    x, (k0, k1) = counter, key
    for _ in range(10):
        left, right = np.uint64(0xD2511F53) * x[0], np.uint64(0xCD9E8D57) * x[2]
        x = [
            (right >> shift) ^ x[1] ^ np.uint64(k0),
            right & mask,
            (left >> shift) ^ x[3] ^ np.uint64(k1),
            left & mask,
        ]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return x


def log_softmax(logits: Sequence[float] | Array) -> Array:
    """float64."""
    values = np.asarray(logits, np.float64)
    shifted: Array = values - values.max()
    result: Array = shifted - np.log(np.exp(shifted).sum())
    return result


def const_logits(values: Mapping[int, float], vocab_size: int) -> Array:
    """CONST's logits, float32."""
    row: Array = np.full(vocab_size, -5.0, np.float32)
    for token, value in values.items():
        row[token] = value
    return row
