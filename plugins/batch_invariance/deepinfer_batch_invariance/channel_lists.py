"""Which vectors of the cache a decode row reads in the layout ``transposed_keys``, once for all layers of a step.

A row's products with the keys of a block are a sum of the block's channels, weighted by the query; its output is, for
each block of :data:`~.attention_tiles.VALUE_BLOCK` columns, a sum of values. Each is a list of its own for every row
and head, so that nothing depends on who else is in the step. The columns are those of
:func:`~.attention_tiles.runs_of`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import attrs
import numpy as np
import torch

from deepinfer_core.api import PagedAttentionRequest, StepLayout

from .attention_tiles import FEW_ROWS, VALUE_BLOCK, Runs
from .key_lists import Ids, buckets

Array = np.ndarray[Any, Any]

PIECE = 1 << 22
"""Numbers in the lists of rows that attend together."""


@attrs.frozen(eq=False)
class Lists:
    """What is the same for all steps in which ``n`` rows read the same ``b`` blocks each.

    Attributes:
        keys: ``[n * heads * b * head_dim]`` vectors of the keys as ``[-1, block_size]``; key_bags: where those of each
            row, head and block begin.
        values: ``[n, heads, b * block_size]`` vectors of the values as ``[-1, head_dim]``, as if a row saw all of them.
        scaled: ``[n, heads, b, head_dim]`` to put scaled queries into, used anew in each layer.
    """

    keys: torch.Tensor
    key_bags: torch.Tensor
    values: Array
    scaled: torch.Tensor


@attrs.frozen(eq=False)
class Group:
    """``rows [n]`` int64 of the step, each with ``width`` columns from position ``skip`` of its first block on.

    ``values``: flat, what a row does not see replaced by the first that it sees. ``value_bags``: where those of each
    row, head and block of columns begin. ``hidden [n, 1, columns - seen]``: of
    the columns past the first ``seen``, those that a row does not see.
    """

    rows: torch.Tensor
    skip: int
    width: int
    lists: Lists
    values: torch.Tensor
    value_bags: torch.Tensor
    seen: int
    hidden: torch.Tensor


class KnownLists:
    """The lists of the last step: while a batch decodes, most steps read the blocks that the step before read."""

    def __init__(self, request: PagedAttentionRequest) -> None:
        self._request = request
        self._last: dict[tuple[int, bytes], Lists] = {}
        self._now: dict[tuple[int, bytes], Lists] = {}

    def forget(self) -> None:
        self._last, self._now = {}, {}

    def groups(self, layout: StepLayout, runs: Runs) -> tuple[Group, ...]:
        """The rows of requests that have few in this step. Lists that it does not ask for are dropped."""
        self._last, self._now = self._now, {}
        request, size = self._request, layout.block_size
        owner, origin, width = (np.repeat(of, runs.count) for of in (runs.owner, runs.origin, runs.width))
        (few,) = (layout.host_query_lens[owner] <= FEW_ROWS).nonzero()
        groups = []
        for kind, same in buckets(width[few] * size + origin[few] % size):
            columns, skip = divmod(kind, size)
            blocks = -(-(skip + columns) // size)
            at_once = max(1, PIECE // (blocks * max(size, request.head_dim) * request.q_heads))
            for start in range(0, len(same), at_once):
                rows = few[same[start : start + at_once]]
                shape = owner[rows], origin[rows], skip, columns
                groups.append(self._group(layout, runs, *shape, rows))
        return tuple(groups)

    def _group(
        self, layout: StepLayout, runs: Runs, owner: Ids, origin: Ids, skip: int, width: int, rows: Ids
    ) -> Group:
        size, first, last = layout.block_size, runs.first[rows], runs.last[rows]
        # A block that the row does not see is not read: it may be another's.
        numbers = origin[:, None] // size + np.arange(-(-(skip + width) // size))
        numbers = np.clip(numbers, (first // size)[:, None], (last // size)[:, None])
        table: Any = layout.block_table.numpy()
        lists = self._of(table[owner[:, None], numbers])
        start, end = first - origin, last - origin + 1
        seen = 0 if start.any() else int(end.min())
        columns = np.arange(seen, width)
        hidden = (columns >= end[:, None]) | (columns < start[:, None])
        values = lists.values[:, :, skip : skip + width]
        if seen < width:
            values = values.copy()
            own = values[np.arange(len(rows)), :, start]
            np.copyto(values[:, :, seen:], own[:, :, None], where=hidden[:, None])
        return Group(
            rows=torch.from_numpy(rows),
            skip=skip,
            width=width,
            lists=lists,
            values=torch.from_numpy(values.reshape(-1)),
            value_bags=_bags(len(rows) * self._request.q_heads, width, VALUE_BLOCK, values.dtype.type),
            seen=seen,
            hidden=torch.from_numpy(hidden[:, None]),
        )

    def _of(self, blocks: Array) -> Lists:
        key = (blocks.shape[1], blocks.tobytes())
        lists = self._last.get(key)
        if lists is None:
            lists = _lists(self._request, blocks)
        self._now[key] = lists
        return lists


def _lists(request: PagedAttentionRequest, blocks: Array) -> Lists:
    """``blocks [n, b]``."""
    size, heads, dim = request.block_size, request.q_heads, request.head_dim
    n, width = blocks.shape
    highest = (int(blocks.max()) + 1) * request.kv_heads * max(size, dim)
    index: Any = np.int32 if max(highest, n * heads * width * max(size, dim)) < 2**31 else np.int64
    kv_head = np.arange(heads, dtype=index) // (heads // request.kv_heads)
    begins = (blocks.astype(index) * index(request.kv_heads))[:, None] + kv_head[:, None]
    keys = begins[..., None] * index(dim) + np.arange(dim, dtype=index)
    values = begins[..., None] * index(size) + np.arange(size, dtype=index)
    return Lists(
        keys=torch.from_numpy(keys.reshape(-1)),
        key_bags=_bags(n * heads * width, dim, dim, index),
        values=values.reshape(n, heads, width * size),
        scaled=torch.empty(n, heads, width, dim),
    )


@lru_cache(maxsize=64)
def _bags(count: int, length: int, step: int, index: Any) -> torch.Tensor:
    """Where the pieces of ``step`` begin in each of ``count`` lists of ``length``."""
    begins = np.arange(0, count * length, length, dtype=index)[:, None] + np.arange(0, length, step, dtype=index)
    return torch.from_numpy(begins.reshape(-1))
