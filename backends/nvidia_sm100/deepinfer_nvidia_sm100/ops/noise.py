"""The noise of a draw: Philox's words, four tokens' by one call, and ``log E`` of them as the core defines it."""

from __future__ import annotations

import triton
import triton.language as tl


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
def bound_of(word):
    """What ``-log E`` does not exceed, by 0.06 and by what E is above ``u = w / 2^32``.

    ``-log E <= -log u``, and a float's bits read as an integer are its base-2 logarithm from below, so that no
    logarithm is taken.
    """
    bits = word.to(tl.float32).to(tl.int32, bitcast=True)
    return 159.0 * 0.6931472 - bits.to(tl.float32) * (0.6931472 / 8388608.0)
