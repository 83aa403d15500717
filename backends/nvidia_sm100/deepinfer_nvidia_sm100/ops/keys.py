"""Logits as unsigned integers of the same order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_of(value):
    """float32 as uint32 of the same order. -0.0 equals 0.0; NaNs are largest."""
    bits = (value + 0.0).to(tl.uint32, bitcast=True)
    key = tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(value != value, 0xFFFFFFFF, key).to(tl.uint32)


@triton.jit
def value_of(key):
    """The float32 of a key, as uint32; a NaN for the largest."""
    bits = tl.where(key >> 31 == 1, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)
