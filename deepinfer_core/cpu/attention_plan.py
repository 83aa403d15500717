"""Which cached rows every query row of a step attends to, worked out once for all layers.

Requests with few query rows (decode rows, drafts) become *gathers*: for each row and head the list of cache rows
it sees, as the columns of a sparse matrix. Rows of similar length share a bucket, padded to its longest with the
row's own first key under a mask of -inf, so that softmax runs over plain matrices and no row ever reads what
belongs to another request. Requests with many query rows (prompt chunks) become *chunks*, for dense attention.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch

from deepinfer_core.api import PagedAttentionRequest, StepLayout

FEW_ROWS = 8
"""A request with at most this many query rows is gathered: below it, copying its keys costs more than it saves."""

CHUNK_ROWS = 512
"""Query rows of one dense attention, to bound its mask."""

SLACK = 32
"""A bucket may be padded by a quarter and by this many keys, about what another bucket's calls would cost."""

Array = np.ndarray[Any, Any]


@attrs.frozen
class Bucket:
    """Entries ``start:end`` of the gather, as a matrix ``[rows * heads, width]``."""

    start: int
    end: int
    width: int


@attrs.frozen
class Gather:
    """Query rows that read the cache in place.

    Attributes:
        rows: ``[n]`` int64, their numbers in the step, bucket by bucket; None when they are all rows in order.
        pattern: CSR ``[n * heads, width]``, where a column is ``cache row * kv_heads + head`` and ``width`` reaches
            the highest block in use; its values are 0, or -inf where padded.
        columns: its column indices, ``[entries]``. offsets: start of each matrix row, ``[n * heads]``.
        buckets: parts of equal width.
    """

    rows: torch.Tensor | None
    pattern: torch.Tensor
    columns: torch.Tensor
    offsets: torch.Tensor
    buckets: tuple[Bucket, ...]


@attrs.frozen
class Part:
    """Query rows ``start:end`` of the step see the chunk's first ``keys`` cached rows, under ``mask`` if given.

    ``mask`` is ``[rows, keys]`` float32, 0 or -inf; None means causal over a square.
    """

    start: int
    end: int
    keys: int
    mask: torch.Tensor | None


@attrs.frozen
class Chunk:
    """One request's dense attention: its blocks, the first row of the first block that counts, and its parts."""

    blocks: torch.Tensor
    skip: int
    parts: tuple[Part, ...]


@attrs.frozen
class AttentionPlan:
    gather: Gather | None
    chunks: tuple[Chunk, ...]


def make_plan(request: PagedAttentionRequest, layout: StepLayout) -> AttentionPlan:
    """The plan of a step. It names cache rows by number only, so every layer of the group can use it."""
    few = few_rows(layout)
    table = layout.block_table.numpy()
    gather = _gather(request, layout, table, few) if layout.host_query_lens[few].any() else None
    return AttentionPlan(gather, chunks_of(request, layout, table, few))


def few_rows(layout: StepLayout) -> Array:
    """``[R]`` bool: requests whose rows are gathered."""
    few: Array = layout.host_query_lens <= FEW_ROWS
    return few


# ---- gathers


def _gather(request: PagedAttentionRequest, layout: StepLayout, table: Array, few: Array) -> Gather:
    owners = np.repeat(np.arange(len(few)), layout.host_query_lens)
    rows = np.nonzero(few[owners])[0]
    last = layout.positions.numpy()[rows]
    if not request.causal:
        last = layout.host_seq_lens[owners[rows]].astype(np.int64) - 1
    first = np.zeros_like(last) if request.window is None else np.maximum(last - request.window + 1, 0)
    lengths = last - first + 1
    spans = _buckets(lengths)
    if len(spans) > 1:
        order = np.argsort(-lengths, kind="stable")
        rows, first, lengths = rows[order], first[order], lengths[order]
    heads, group = request.q_heads, request.q_heads // request.kv_heads
    width = (int(table[few].max()) + 1) * layout.block_size * request.kv_heads
    index: Any = np.int32 if width < 2**31 else np.int64
    kv_head = (np.arange(heads, dtype=index) // group)[None, :, None]
    columns, values, starts, buckets, entries = [], [], [], [], 0
    for begin, end, longest in spans:
        part = slice(begin, end)
        cached = _cache_rows(table, owners[rows[part]], first[part], lengths[part], longest, layout.block_size, index)
        columns.append((cached[:, None] * index(request.kv_heads) + kv_head).reshape(-1))
        mask = np.where(np.arange(longest) < lengths[part, None], np.float32(0), np.float32(-np.inf))
        values.append(np.broadcast_to(mask[:, None], (end - begin, heads, longest)).reshape(-1))
        size = (end - begin) * heads * longest
        starts.append(np.arange(entries, entries + size, longest, dtype=index))
        buckets.append(Bucket(entries, entries + size, longest))
        entries += size
    offsets = torch.from_numpy(np.concatenate([*starts, np.array([entries], index)]))
    all_columns = torch.from_numpy(np.concatenate(columns))
    pattern = torch.sparse_csr_tensor(
        offsets,
        all_columns,
        torch.from_numpy(np.concatenate(values)),
        size=(len(rows) * heads, width),
        check_invariants=False,
    )
    whole = len(spans) == 1 and len(rows) == len(owners)
    return Gather(None if whole else torch.from_numpy(rows), pattern, all_columns, offsets[:-1], tuple(buckets))


def _buckets(lengths: Array) -> list[tuple[int, int, int]]:
    """``(begin, end, width)`` over the rows by length, longest first; one bucket keeps the rows' own order."""
    longest = int(lengths.max())
    if _fits(int(lengths.min()), longest):
        return [(0, len(lengths), longest)]
    spans, begin = [], 0
    ordered = np.sort(lengths)[::-1].tolist()
    for row, length in enumerate(ordered):
        if not _fits(length, ordered[begin]):
            spans.append((begin, row, ordered[begin]))
            begin = row
    return [*spans, (begin, len(ordered), ordered[begin])]


def _fits(length: int, width: int) -> bool:
    return length * 5 >= (width - SLACK) * 4


def _cache_rows(
    table: Array, owners: Array, first: Array, lengths: Array, width: int, block_size: int, index: Any
) -> Array:
    """``[n, width]`` cache rows that each query row sees, in order; past its length, the first of them again."""
    steps = np.arange(width)
    cached = first[:, None] + np.where(steps < lengths[:, None], steps, 0)
    blocks = table[owners[:, None], cached // block_size].astype(index)
    rows: Array = blocks * index(block_size) + (cached % block_size).astype(index)
    return rows


# ---- chunks


def chunks_of(request: PagedAttentionRequest, layout: StepLayout, table: Array, few: Array) -> tuple[Chunk, ...]:
    """The other requests' dense attention."""
    many = np.nonzero(~few)[0].tolist()
    if not many:
        return ()
    counts, contexts = layout.host_query_lens, layout.host_seq_lens
    starts = np.cumsum(counts) - counts
    return tuple(_chunk(request, table[r], int(starts[r]), int(counts[r]), int(contexts[r])) for r in many)


def _chunk(request: PagedAttentionRequest, blocks: Array, start: int, count: int, context: int) -> Chunk:
    size, window = request.block_size, request.window
    before = context - count  # position of the first query row
    lowest = 0 if window is None else max(0, before - window + 1)
    first_block = lowest // size
    used = torch.from_numpy(blocks[first_block : -(-context // size)].astype(np.int64))
    parts = []
    for begin in range(0, count, CHUNK_ROWS):
        end = min(begin + CHUNK_ROWS, count)
        keys = before + end - lowest if request.causal else context
        square = request.causal and begin == 0 and end == keys and window is None
        mask = None if square else _mask(before + begin - lowest, end - begin, keys, window)
        if not request.causal:
            mask = torch.zeros(end - begin, keys)
        parts.append(Part(start + begin, start + end, keys, mask))
    return Chunk(used, lowest - first_block * size, tuple(parts))


def _mask(first: int, rows: int, keys: int, window: int | None) -> torch.Tensor:
    """``[rows, keys]``: row i sees key j iff ``first + i - window < j <= first + i``."""
    position = torch.arange(first, first + rows)[:, None]
    key = torch.arange(keys)
    hidden = key > position
    if window is not None:
        hidden |= key <= position - window
    return torch.zeros(rows, keys).masked_fill_(hidden, float("-inf"))
