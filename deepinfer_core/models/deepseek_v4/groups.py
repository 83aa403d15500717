"""What is kept of past tokens: one cache group for each kind of state.

All are paged under one block numbering in tokens. A pooled entry has one row for ``rate`` tokens; the tail rows are the
poolings' inputs of the last window or two, so that a window may close in a later step.
"""

from __future__ import annotations

from deepinfer_core.api import CacheEntry, CacheGroupSpec

from .config import V4Config

WINDOW, CSA, HCA = "window", "csa", "hca"
CSA_TAIL, HCA_TAIL = "csa_tail", "hca_tail"
INDEX, INDEX_TAIL = "index", "index_tail"
DRAFT = "draft"


def cache_groups(c: V4Config, dtype: str) -> tuple[CacheGroupSpec, ...]:
    """Groups of the main model."""
    csa, hca = c.kinds.count("csa"), c.kinds.count("hca")
    groups = [window_group(WINDOW, c, dtype, c.layers)]
    if csa:
        groups += [
            _entries(CSA, csa, "kv", c.head_dim, dtype, c.csa_rate),
            _tail(CSA_TAIL, csa, 2 * c.head_dim, dtype, 2 * c.csa_rate),
            _entries(INDEX, csa, "key", c.index_dim, dtype, c.csa_rate),
            _tail(INDEX_TAIL, csa, 2 * c.index_dim, dtype, 2 * c.csa_rate),
        ]
    if hca:
        groups += [
            _entries(HCA, hca, "kv", c.head_dim, dtype, c.hca_rate),
            _tail(HCA_TAIL, hca, c.head_dim, dtype, c.hca_rate),
        ]
    return tuple(groups)


def window_group(name: str, c: V4Config, dtype: str, layers: int) -> CacheGroupSpec:
    """Raw rows of the last ``sliding_window`` tokens, one vector a token. Of the main model, or of draft stages."""
    entries = (CacheEntry("kv", (c.head_dim,), dtype),)
    return CacheGroupSpec(name=name, kind="window", window=c.window, layers=layers, entries=entries)


def wide(dtype: str) -> str:
    """The dtype that float32 arithmetic is done in: float64 for a float64 model."""
    return "float64" if dtype == "float64" else "float32"


def _entries(name: str, layers: int, entry: str, width: int, dtype: str, rate: int) -> CacheGroupSpec:
    entries = (CacheEntry(entry, (width,), dtype),)
    return CacheGroupSpec(name=name, layers=layers, entries=entries, tokens_per_row=rate)


def _tail(name: str, layers: int, width: int, dtype: str, window: int) -> CacheGroupSpec:
    entries = (CacheEntry("value", (width,), wide(dtype)), CacheEntry("score", (width,), wide(dtype)))
    return CacheGroupSpec(name=name, kind="window", window=window, layers=layers, entries=entries)
