"""Philox4x32-10 (Salmon et al. 2011) on the host, for the noise of a draw.

Words are 32-bit values in uint64 arrays, so that a product of two fits. The rounds are written for in-place
buffers: ten rounds over a vocabulary are some hundred passes over arrays that stay in the processor's cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Words = np.ndarray[Any, np.dtype[np.uint64]]

_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32_10(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Words, ...]:
    """Four output words of a counter of four and a key of two words, all of one shape or broadcast to it.

    Each word is an int or an array; arrays are left alone.
    """
    shape = np.broadcast_shapes(*(np.shape(part) for part in (*counter, *key)))
    c0, c1, c2, c3 = (np.array(np.broadcast_to(part, shape), np.uint64) for part in counter)
    low, high = np.empty(shape, np.uint64), np.empty(shape, np.uint64)
    k0, k1 = (np.asarray(part, np.uint64) for part in key)
    for _ in range(_ROUNDS):
        np.multiply(c0, _MULTIPLIERS[0], out=low)
        np.multiply(c2, _MULTIPLIERS[1], out=high)
        # c0 = high word of c2's product ^ c1 ^ k0; c1 = its low word; c2 and c3 likewise from c0's product.
        np.right_shift(high, _HALF, out=c0)
        c0 ^= c1
        c0 ^= k0
        np.right_shift(low, _HALF, out=c2)
        c2 ^= c3
        c2 ^= k1
        np.bitwise_and(high, _WORD, out=c1)
        np.bitwise_and(low, _WORD, out=c3)
        k0, k1 = (k0 + np.uint64(_KEY_STEPS[0])) & _WORD, (k1 + np.uint64(_KEY_STEPS[1])) & _WORD
    return c0, c1, c2, c3
