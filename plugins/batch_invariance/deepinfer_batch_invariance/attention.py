"""Paged attention on the host, float32: one row of one head is one list of keys, in order of position.

A list depends on the row's own position and the window: scores, softmax and weighted sum go over it alone, decode row
or prompt row, and no list is padded to the length of another. Keys and values are read where they lie in the cache:
a product sampled at the listed rows gives the scores, and a weighted sum of listed value rows the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import torch

from deepinfer_core.api import BuildContext, LayerCache, PagedAttentionRequest, StepLayout

from .attention_check import check_paged
from .key_lists import Ids, buckets, room
from .layouts import host_positions
from .listed import expect_sparse_tensors, sampled

PIECE = 1 << 17
"""Scores computed at a time, so that they stay in the processor's cache."""

KEPT = 1 << 25
"""Lists of a step up to this many entries are kept for all layers; longer ones are made again for each."""


@attrs.frozen(eq=False)
class Piece:
    """Rows that attend in one go.

    Attributes:
        rows: ``[n]`` int64, their numbers in the step.
        pattern: CSR ``[n * heads, cache rows * kv_heads]``; its values are 0, or -inf past the end of a list.
        columns: its column indices. offsets: where each list begins, ``[n * heads]``.
        parts: (first entry, end, width) of the lists of each width.
    """

    rows: torch.Tensor
    pattern: torch.Tensor
    columns: torch.Tensor
    offsets: torch.Tensor
    parts: tuple[tuple[int, int, int], ...]


@attrs.frozen(eq=False)
class Plan:
    """The lists of a step: ``keys[i]`` of request ``owners[i]`` from position ``first[i]`` on, for every row i.

    ``chunks``: rows by width, as many as one piece takes. ``pieces``: made once, or None when they are too many.
    """

    layout: StepLayout
    owners: Ids
    first: Ids
    keys: Ids
    chunks: tuple[tuple[tuple[int, Ids], ...], ...]
    pieces: tuple[Piece, ...] | None


class PagedAttention:
    """``softmax(scale * q k^T) v`` over the visible positions of each row."""

    def __init__(self, request: PagedAttentionRequest, context: BuildContext) -> None:
        self._request = request
        expect_sparse_tensors()
        check_paged(self, request, context.num_threads)

    def plan(self, layout: StepLayout) -> Plan:
        """What each row reads, from the host copies of the step's layout."""
        r = self._request
        last = host_positions(layout)
        first = np.zeros_like(last) if r.window is None else np.maximum(last - r.window + 1, 0)
        keys = last - first + 1
        owners = np.repeat(np.arange(len(layout.host_query_lens)), layout.host_query_lens)
        chunks = tuple(_chunks(buckets(room(keys)), r.q_heads))
        plan = Plan(layout, owners, first, keys, chunks, None)
        entries = sum(width * len(rows) for chunk in chunks for width, rows in chunk) * r.q_heads
        if entries > KEPT:
            return plan
        return attrs.evolve(plan, pieces=tuple(self._piece(plan, chunk) for chunk in chunks))

    def run(
        self, query: torch.Tensor, cache: LayerCache, plan: Plan, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``query [T, q_heads, head_dim]`` float32 -> the same shape, fresh memory."""
        pieces = plan.pieces if plan.pieces is not None else (self._piece(plan, chunk) for chunk in plan.chunks)
        output = torch.empty(query.shape)
        for piece in pieces:
            output.index_copy_(0, piece.rows, self._attend(query.index_select(0, piece.rows), cache, piece))
        return output

    def _attend(self, query: torch.Tensor, cache: LayerCache, piece: Piece) -> torch.Tensor:
        """``[n, q_heads, head_dim]`` -> fresh ``[n, q_heads, head_dim]``."""
        r = self._request
        scores = sampled(piece.pattern, query.reshape(-1, r.head_dim), cache["key"].view(-1, r.head_dim), r.scale)
        for start, end, width in piece.parts:
            part = scores[start:end].view(-1, width)
            torch.softmax(part, dim=-1, out=part)
        values = cache["value"].view(-1, r.head_dim)
        summed = torch.embedding_bag(values, piece.columns, piece.offsets, False, 0, False, scores)[0]
        return summed.view(query.shape)

    def _piece(self, plan: Plan, chunk: tuple[tuple[int, Ids], ...]) -> Piece:
        r, table = self._request, plan.layout.block_table.numpy()
        heads = r.q_heads
        highest = max((int(table.max()) + 1) * r.block_size * r.kv_heads, max(width for width, _ in chunk))
        index: Any = np.int32 if highest < 2**31 else np.int64
        kv_head = (np.arange(heads, dtype=index) // (heads // r.kv_heads))[None, :, None]
        columns, values, starts, parts, entries = [], [], [], [], 0
        for width, rows in chunk:
            steps = np.arange(width)
            inside = steps < plan.keys[rows, None]
            # Past its end a list names its first key again, under a score of -inf.
            position = plan.first[rows, None] + np.where(inside, steps, 0)
            block, offset = np.divmod(position, r.block_size)
            cached = (table[plan.owners[rows, None], block] * r.block_size + offset).astype(index)
            columns.append((cached[:, None] * index(r.kv_heads) + kv_head).reshape(-1))
            mask = np.where(inside, np.float32(0), np.float32(-np.inf))
            values.append(np.broadcast_to(mask[:, None], (len(rows), heads, width)).reshape(-1))
            size = len(rows) * heads * width
            starts.append(np.arange(entries, entries + size, width, dtype=index))
            parts.append((entries, entries + size, width))
            entries += size
        offsets = torch.from_numpy(np.concatenate([*starts, np.array([entries], index)]))
        all_columns = torch.from_numpy(np.concatenate(columns))
        rows = np.concatenate([rows for _, rows in chunk])
        pattern = torch.sparse_csr_tensor(
            offsets,
            all_columns,
            torch.from_numpy(np.concatenate(values)),
            size=(len(rows) * heads, highest),
            check_invariants=False,
        )
        return Piece(torch.from_numpy(rows), pattern, all_columns, offsets[:-1], tuple(parts))


def _chunks(by_width: list[tuple[int, Ids]], heads: int) -> Iterator[tuple[tuple[int, Ids], ...]]:
    """Rows by width, cut into what one piece takes."""
    chunk: list[tuple[int, Ids]] = []
    left = PIECE
    for width, rows in by_width:
        rest = rows
        while len(rest):
            fit = left // (width * heads)
            if fit == 0 and chunk:
                yield tuple(chunk)
                chunk, left = [], PIECE
                continue
            taken = rest[: max(fit, 1)]
            chunk.append((width, taken))
            left -= len(taken) * width * heads
            rest = rest[len(taken) :]
    if chunk:
        yield tuple(chunk)
