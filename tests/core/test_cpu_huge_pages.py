"""Advice about huge pages covers the memory and changes none of it."""

from __future__ import annotations

import mmap
import random

import numpy as np
import pytest

from deepinfer_core.cpu import huge_pages

HUGE = huge_pages.HUGE


@pytest.mark.parametrize("used", [False, True])
def test_memory_keeps_what_it_holds(used: bool) -> None:
    expected = np.random.default_rng(random.getrandbits(63)).integers(0, 256, 3 * HUGE + 4567, np.uint8)
    memory = expected.copy()
    huge_pages.ask_for_huge_pages(memory.ctypes.data, memory.nbytes, used=used)
    assert np.array_equal(memory, expected)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no advice about huge pages on this system")
def test_every_page_that_is_touched_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(huge_pages, "_madvise", lambda *call: asked.append(call))
    for _ in range(50):
        asked.clear()
        address, size = random.randrange(1 << 40), random.randrange(huge_pages.SMALLEST, 1 << 26)
        huge_pages.ask_for_huge_pages(address, size, used=True)
        (start, length, advice), again = asked
        assert advice == mmap.MADV_HUGEPAGE
        assert again[:2] == (start, length)
        assert start % HUGE == length % HUGE == 0
        assert start <= address < start + HUGE
        assert address + size <= start + length < address + size + HUGE
    asked.clear()
    huge_pages.ask_for_huge_pages(1 << 30, huge_pages.SMALLEST - 1, used=True)
    assert not asked
