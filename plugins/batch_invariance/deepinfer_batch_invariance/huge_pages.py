"""Packed weights in pages of two megabytes: a decode step reads them from end to end.

Advice to the kernel (Linux 6.1 for memory in use); where it is refused nothing changes.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

HUGE = 1 << 21
COLLAPSE = 25
"""MADV_COLLAPSE, which the module ``mmap`` does not name: pages in use are moved into huge ones."""


def move_to_huge_pages(packed: torch.Tensor) -> None:
    """Of a weight in oneDNN's layout, on the host: every huge page that lies in it whole."""
    operators = torch.ops.mkldnn
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or not hasattr(operators, "data_ptr") or not hasattr(operators, "_nbytes"):
        return
    begin, size = int(operators.data_ptr(packed)), int(operators._nbytes(packed))
    start, end = -(-begin // HUGE) * HUGE, (begin + size) // HUGE * HUGE
    if end <= start:
        return
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for wanted in (advice, COLLAPSE):
        call(start, end - start, wanted)
