"""Memory in pages of two megabytes, where the kernel gives them to those who ask.

A step reads the weights and the cache from end to end. In pages of four kilobytes each of them costs a walk through the
page tables, which is twice as long in a virtual machine. This is advice: a kernel that refuses it changes nothing.
"""

from __future__ import annotations

import ctypes
import mmap

HUGE = 1 << 21
SMALLEST = 1 << 20
"""Bytes below which nothing is asked for."""

_COLLAPSE = 25
"""MADV_COLLAPSE (Linux 6.1): move memory that is in use into huge pages now. The module ``mmap`` does not name it."""


def ask_for_huge_pages(address: int, size: int, *, used: bool) -> None:
    """Advise the kernel about every huge page that ``size`` bytes at ``address`` touch.

    Args:
        used: the memory holds data already, so that its pages have to be moved.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or size < SMALLEST:
        return
    start = address // HUGE * HUGE
    length = -(-(address + size - start) // HUGE) * HUGE
    for wanted in (advice, _COLLAPSE) if used else (advice,):
        _madvise(start, length, wanted)


def _madvise(start: int, length: int, advice: int) -> None:
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    call(start, length, advice)
