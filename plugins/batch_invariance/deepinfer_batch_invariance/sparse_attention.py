"""Attention over a window and entries on the host, float32: every row of every head is one list of keys.

First the sink, then the window in order of position, then the entries in order of number. There is room for whole
blocks of each, by the row's own position. Keys are read where they lie in the two caches.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np
import torch

from deepinfer_core.api import BuildContext, LayerCache, SparseAttentionRequest, StepLayout

from .attention_check import check_sparse
from .key_lists import Ids, room
from .layouts import host_positions
from .listed import Lists, expect_sparse_tensors, lists_of

PIECE = 1 << 20
"""Scores computed at a time, so that they stay in the processor's cache."""


@attrs.frozen(eq=False)
class Group:
    """Rows with equal room.

    Attributes:
        rows: ``[n]`` int64, their numbers in the step. owners: ``[n]``, their requests.
        window, entries: the keys; entries is None where there are none, or where they are chosen later.
        width: room for entries.
    """

    rows: torch.Tensor
    owners: Ids
    window: Lists
    entries: Lists | None
    width: int


@attrs.frozen(eq=False)
class Plan:
    """``groups`` of rows, and the entries' block ids ``table [R, B]``; None without entries."""

    groups: tuple[Group, ...]
    table: Ids | None


class SparseAttention:
    """``softmax([sink, scale * q k^T]) [0, k]``."""

    def __init__(self, request: SparseAttentionRequest, context: BuildContext) -> None:
        self._request = request
        self._per_block = request.block_size // request.rate if request.rate else 1
        expect_sparse_tensors()
        check_sparse(self, request, context.num_threads)

    def write(self, kv: torch.Tensor, cache: LayerCache, layout: StepLayout) -> None:
        """Write ``kv [T, head_dim]`` at ``layout.slot_mapping``."""
        cache["kv"].view(-1, self._request.head_dim).index_copy_(0, layout.slot_mapping, kv)

    def plan(self, layout: StepLayout, entry_layout: StepLayout | None = None) -> Plan:
        """What each row reads, for all layers of this kind."""
        r = self._request
        position = host_positions(layout)
        owners = np.repeat(np.arange(len(layout.host_query_lens)), layout.host_query_lens)
        if r.causal:
            first, last = np.maximum(position - r.window + 1, 0), position
        else:
            context = layout.host_seq_lens[owners].astype(np.int64)
            first = np.maximum(context - layout.host_query_lens[owners] - r.window, 0)
            last = context - 1
        entries = np.zeros_like(position)
        entry_table: Ids | None = None
        if entry_layout is not None:
            entries = (position + 1) // r.rate
            entry_table = entry_layout.block_table.numpy().astype(np.int64)
        table = layout.block_table.numpy().astype(np.int64)
        groups = []
        for rows, wide, width in self._groups(last - first + 1, entries):
            numbers = first[rows, None] + np.arange(wide)
            block, offset = np.divmod(np.minimum(numbers, last[rows, None]), r.block_size)
            cached = table[owners[rows, None], block] * r.block_size + offset
            listed = None
            if entry_table is not None and width and not r.chosen:
                ids = np.arange(width)[None].repeat(len(rows), 0)
                listed = self._entries(entry_table, owners[rows], np.where(ids < entries[rows, None], ids, -1))
            groups.append(
                Group(
                    rows=torch.from_numpy(rows),
                    owners=owners[rows],
                    window=lists_of(cached, numbers > last[rows, None], r.heads),
                    entries=listed,
                    width=width,
                )
            )
        return Plan(tuple(groups), entry_table)

    def _groups(self, window: Ids, entries: Ids) -> Iterator[tuple[Ids, int, int]]:
        """(rows, room for window keys, room for entries), as many rows as one piece takes."""
        r = self._request
        wide, width = room(window), np.where(entries > 0, room(entries), 0)
        if r.chosen:
            width = np.minimum(width, r.chosen)
        for pair in np.unique(np.stack((wide, width), axis=1), axis=0).tolist():
            (rows,) = ((wide == pair[0]) & (width == pair[1])).nonzero()
            at_once = max(1, PIECE // ((1 + pair[0] + pair[1]) * r.heads))
            for start in range(0, len(rows), at_once):
                yield rows[start : start + at_once], pair[0], pair[1]

    def _entries(self, table: Ids, owners: Ids, ids: Ids) -> Lists:
        """Lists of entries ``ids [n, e]``; -1 for none, which reads the row's first entry and counts nothing."""
        block, offset = np.divmod(np.maximum(ids, 0), self._per_block)
        return lists_of(table[owners[:, None], block] * self._per_block + offset, ids < 0, self._request.heads)

    def run(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        entries: LayerCache | None,
        plan: Plan,
        sinks: torch.Tensor,
        chosen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``query [T, heads, head_dim]`` float32 -> the same shape, fresh memory."""
        r, output = self._request, torch.empty(query.shape)
        keys = cache["kv"].view(-1, r.head_dim)
        for group in plan.groups:
            n, listed = len(group.owners), group.entries
            rows = query.index_select(0, group.rows).reshape(-1, r.head_dim)
            parts = [sinks.repeat(n)[:, None], group.window.products(rows, keys, r.scale)]
            if chosen is not None and plan.table is not None and group.width:
                ids = chosen.index_select(0, group.rows).numpy()[:, : group.width]
                listed = self._entries(plan.table, group.owners, ids)
            pooled = None if entries is None or listed is None else entries["kv"].view(-1, r.head_dim)
            if pooled is not None and listed is not None:
                parts.append(listed.products(rows, pooled, r.scale))
            weights = torch.softmax(torch.cat(parts, 1), dim=-1)
            end = 1 + group.window.width
            attended = group.window.weighted(keys, weights[:, 1:end])
            if pooled is not None and listed is not None:
                attended.add_(listed.weighted(pooled, weights[:, end:]))
            output.index_copy_(0, group.rows, attended.view(n, r.heads, r.head_dim))
        return output
