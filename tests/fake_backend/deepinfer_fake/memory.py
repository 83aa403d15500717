"""The device's memory: a pool with a size, whose bytes are poisoned when they are handed out."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence

import numpy as np
import torch

POISON = 0xFF
"""Every byte of fresh memory: NaN in floating point, -1 in integers."""


class FakeOutOfMemory(RuntimeError):
    """The pool has not enough bytes left. What a vendor's runtime raises under a name of its own."""


class Pool:
    """Counts the bytes of living tensors. Memory comes back when the last tensor that shares it is gone."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._used = 0
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        return self._used

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of poison.

        Raises:
            FakeOutOfMemory: naming what was asked for and what is left.
        """
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            return torch.empty(*shape, dtype=dtype)
        with self._lock:
            if self._used + size > self.capacity:
                raise FakeOutOfMemory(f"fake device: {size} bytes asked for, {self.capacity - self._used} left")
            self._used += size
        buffer = np.full(size, POISON, np.uint8)  # torch keeps this very object as long as a tensor shares it
        weakref.finalize(buffer, self._give_back, size)
        return torch.from_numpy(buffer).view(dtype).view(*shape)

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """The values of ``source`` in memory of the pool."""
        return self.empty(source.shape, source.dtype).copy_(source)

    def _give_back(self, size: int) -> None:
        with self._lock:
            self._used -= size


POOL = Pool(0)
"""The process's pool, as a driver has one. The device sets its size."""
