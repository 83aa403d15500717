"""Which rows of a step attend together, and over which columns of keys. Bits are decided by a row's position alone.

The columns of a row begin at a fixed position (0, or the boundary below its window) and there are as many as
:func:`~.key_lists.room` gives its last one. Rows of one request whose columns are the same make a tile: rows of a
prompt are cut into tiles over one gathered context, decode rows of several requests make one tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import torch

from deepinfer_core.api import PagedAttentionRequest, StepLayout

from .key_lists import KEY_BLOCK, Ids, room
from .layouts import host_positions

PIECE = 1 << 19
"""Scores, or gathered numbers of stacked requests, at a time, so that they stay in the processor's cache."""
FEW_ROWS = 8
"""Requests with up to this many rows in a step are stacked; others gather their context once."""
VALUE_BLOCK = 128
"""Columns whose weighted values are added up in order; blocks of them are added in order."""
ROWS_STEP = 4
"""The rows of a product are filled up to a multiple."""


@attrs.frozen(eq=False)
class Tile:
    """``count`` rows of each request of a span, over ``width`` columns from ``start`` on.

    Attributes:
        rows: ``[R * count]`` int64, their numbers in the step. neighbours: they are consecutive.
        seen: columns that every row sees. hidden: ``[R, 1, count, 1, width - seen]``, True where a row does not.
        ends: ``[R, count]``: columns of the span up to and with the row's own.
    """

    rows: torch.Tensor
    neighbours: bool
    count: int
    start: int
    width: int
    seen: int
    hidden: torch.Tensor
    ends: torch.Tensor

    def of(self, step: torch.Tensor) -> torch.Tensor:
        """This tile's rows of the step's ``[T, ...]``, in place where they are neighbours."""
        if self.neighbours:
            return step.narrow(0, int(self.rows[0]), len(self.rows))
        return step.index_select(0, self.rows)

    def put(self, rows: torch.Tensor, step: torch.Tensor) -> None:
        """The other way."""
        if self.neighbours:
            step.narrow(0, int(self.rows[0]), len(self.rows)).copy_(rows)
        else:
            step.index_copy_(0, self.rows, rows)


@attrs.frozen(eq=False)
class Lists:
    """Values where they lie in the cache, as rows ``[blocks * block_size * kv_heads, head_dim]``.

    ``columns [R * kv_heads * group * width]``, or heads before requests as in the span's products; ``offsets``: where
    each block of :data:`VALUE_BLOCK` begins.
    """

    columns: torch.Tensor
    offsets: torch.Tensor


@attrs.frozen(eq=False)
class Span:
    """``blocks [R * B]`` int64: what each of R requests gathers. Its tiles' columns begin ``skip`` rows into that.

    ``by_head``: products are made for one head and all requests at a time, else for one request and all heads.
    ``lists``: for one row a request.
    """

    requests: int
    by_head: bool
    skip: int
    blocks: torch.Tensor
    tiles: tuple[Tile, ...]
    lists: Lists | None


@attrs.frozen(eq=False)
class Runs:
    """Consecutive rows of one request with the same columns: first row, number of rows, request, first column, columns.

    ``first`` and ``last [T]``: the positions that each row of the step sees.
    """

    begin: Ids
    count: Ids
    owner: Ids
    origin: Ids
    width: Ids
    first: Ids
    last: Ids


def runs_of(request: PagedAttentionRequest, layout: StepLayout) -> Runs:
    """The step's rows, cut where their columns change."""
    last = host_positions(layout)
    first, origin = np.zeros_like(last), np.zeros_like(last)
    if request.window is not None:
        step = max(KEY_BLOCK, 1 << max(request.window.bit_length() - 3, 0))
        first = np.maximum(last - request.window + 1, 0)
        origin = first // step * step
    width = room(last - origin + 1)
    owner = np.repeat(np.arange(len(layout.host_query_lens)), layout.host_query_lens)
    columns = np.stack((owner, origin, width))
    (changes,) = np.any(columns[:, 1:] != columns[:, :-1], axis=0).nonzero()
    begin = np.concatenate(([0], changes + 1)) if len(last) else np.zeros(0, np.int64)
    count = np.diff(np.concatenate((begin, [len(last)])))
    return Runs(begin, count, owner[begin], origin[begin], width[begin], first, last)


def spans_of(request: PagedAttentionRequest, layout: StepLayout, runs: Runs) -> Iterator[Span]:
    """All rows of the step, each in one tile."""
    lens = layout.host_query_lens[runs.owner]
    (few,) = (lens <= FEW_ROWS).nonzero()
    kinds = (runs.width * (FEW_ROWS + 1) + runs.count)[few] * request.block_size + runs.origin[few] % request.block_size
    for kind in np.unique(kinds):
        same = few[kinds == kind]
        at_once = max(1, PIECE // (int(runs.width[same[0]]) * request.kv_heads * request.head_dim))
        for start in range(0, len(same), at_once):
            yield _stacked(request, layout, runs, same[start : start + at_once])
    yield from prompts_of(request, layout, runs)


def prompts_of(request: PagedAttentionRequest, layout: StepLayout, runs: Runs) -> Iterator[Span]:
    """The rows of requests that are not stacked."""
    for owner in np.unique(runs.owner[layout.host_query_lens[runs.owner] > FEW_ROWS]).tolist():
        (mine,) = (runs.owner == owner).nonzero()
        yield _prompt(request, layout, runs, mine)


def _stacked(request: PagedAttentionRequest, layout: StepLayout, runs: Runs, chosen: Ids) -> Span:
    """Runs of equally many rows and columns, which begin at the same place in a block."""
    rows = runs.begin[chosen, None] + np.arange(runs.count[chosen[0]])
    origin = runs.origin[chosen]
    width = int(runs.width[chosen[0]])
    tile = _tile(request, runs, rows, origin, 0, width)
    span = _span(request, layout, runs, chosen, rows, (tile,))
    if rows.shape[1] > 1:
        return span
    # Behind its last key a list names that key again, under a weight of 0.
    seen = np.clip(origin[:, None] + np.arange(width), runs.first[rows], runs.last[rows])
    return attrs.evolve(span, lists=_lists(request, layout, runs.owner[chosen], seen, span.by_head))


def _prompt(request: PagedAttentionRequest, layout: StepLayout, runs: Runs, mine: Ids) -> Span:
    """All rows of one request."""
    base, tiles = runs.origin[mine[0]], []
    for run in mine:
        origin, width = runs.origin[run], int(runs.width[run])
        at_once = max(ROWS_STEP, PIECE // (width * request.q_heads))
        for done in range(0, int(runs.count[run]), at_once):
            rows = runs.begin[run] + np.arange(done, min(done + at_once, runs.count[run]))
            tiles.append(_tile(request, runs, rows[None], origin[None], int(origin - base), width))
    every = np.arange(runs.begin[mine[0]], runs.begin[mine[-1]] + runs.count[mine[-1]])[None]
    return _span(request, layout, runs, mine[:1], every, tuple(tiles))


def _tile(request: PagedAttentionRequest, runs: Runs, rows: Ids, origin: Ids, start: int, width: int) -> Tile:
    """``rows [R, count]``, ``origin [R]``: the position of column 0."""
    first, ends = runs.first[rows] - origin[:, None], runs.last[rows] - origin[:, None] + 1
    seen = int(ends.min()) if request.window is None else 0
    columns = np.arange(seen, width)
    hidden = (columns >= ends[..., None]) | (columns < first[..., None])
    numbers = rows.reshape(-1)
    return Tile(
        rows=torch.from_numpy(numbers),
        neighbours=bool((np.diff(numbers) == 1).all()),
        count=rows.shape[1],
        start=start,
        width=width,
        seen=seen,
        hidden=torch.from_numpy(hidden[:, None, :, None]),
        ends=torch.from_numpy(ends + start),
    )


def _span(
    request: PagedAttentionRequest, layout: StepLayout, runs: Runs, chosen: Ids, rows: Ids, tiles: tuple[Tile, ...]
) -> Span:
    """``chosen [R]``: the first runs of the requests; ``rows [R, n]``: all their rows."""
    size, origin = request.block_size, runs.origin[chosen, None]
    skip = int(origin[0, 0] % size)
    wanted = origin // size + np.arange(-(-(skip + max(t.start + t.width for t in tiles)) // size))
    # A block that no row sees is not read: it may be another's.
    read = np.clip(wanted, runs.first[rows[:, :1]] // size, runs.last[rows[:, -1:]] // size)
    table: Any = layout.block_table.numpy()
    blocks = table[runs.owner[chosen, None], read].astype(np.int64)
    return Span(len(chosen), len(chosen) > request.kv_heads, skip, torch.from_numpy(blocks.reshape(-1)), tiles, None)


def _lists(request: PagedAttentionRequest, layout: StepLayout, owner: Ids, positions: Ids, by_head: bool) -> Lists:
    """``positions [R, width]``."""
    table: Any = layout.block_table.numpy()
    block, offset = np.divmod(positions, request.block_size)
    slots = table[owner[:, None], block].astype(np.int64) * request.block_size + offset
    heads, group, width = request.kv_heads, request.q_heads // request.kv_heads, positions.shape[1]
    entries, highest = slots.size * request.q_heads, int(slots.max() + 1) * heads
    index: Any = np.int32 if max(entries, highest) < 2**31 else np.int64
    rows = (slots * heads).astype(index)[:, None] + np.arange(heads, dtype=index)[:, None]
    rows = rows.swapaxes(0, 1) if by_head else rows
    columns = np.repeat(rows[:, :, None], group, axis=2).reshape(-1)
    offsets = np.arange(0, entries, width, dtype=index)[:, None] + np.arange(0, width, VALUE_BLOCK, dtype=index)
    return Lists(torch.from_numpy(columns), torch.from_numpy(offsets.reshape(-1)))
