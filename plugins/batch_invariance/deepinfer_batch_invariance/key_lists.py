"""How many keys a row's list has room for: by the row's own number of keys alone."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Ids: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

KEY_BLOCK = 32
"""Keys of a block. Lists of more than eight blocks grow in steps of an eighth of the power of two below them."""


def room(keys: Ids) -> Ids:
    """Numbers of keys, rounded up to whole steps; at least one block. At most an eighth, or a block, is empty."""
    powers = np.floor(np.log2(np.maximum(keys - 1, 1))).astype(np.int64)
    steps = np.maximum(1 << np.maximum(powers - 3, 0), KEY_BLOCK)
    rounded: Ids = -(-np.maximum(keys, 1) // steps) * steps
    return rounded


def buckets(widths: Ids) -> list[tuple[int, Ids]]:
    """``(width, rows)`` for every width, ascending; rows in their order."""
    return [(int(width), np.nonzero(widths == width)[0]) for width in np.unique(widths)]
