"""Attention over a window and chosen entries on the host: all rows of a decode step in one gather and two products.

Before the keys that a row sees comes one of zeros, whose score is the sink: it takes its share of the softmax and adds
nothing. Rows that see fewer keys than others are filled up with zeros too, under a score of -inf.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch

from deepinfer_core.api import BuildContext, LayerCache, SparseAttentionRequest, StepLayout

from .few_rows import FEW_ROWS, MOST_GATHERED, FewRows, Ids, ManyRows, joined, split


@attrs.frozen(eq=False)
class Gather:
    """What n rows read, in C columns: the sink's, the window's, the entries'.

    Attributes:
        few, entry_owners: the rows, and the same in the entries' block table; None without entries.
        zeros: ``[n, 1, head_dim]``, the sink's key. sink: ``[1, C]``, True in its column.
        window: ``[n * w]``, cache rows. entries: ``[n * e]`` likewise; None when they are chosen later.
        num_entries: e.
        empty: ``[n, C]``, True where a row has no key; None when every row has all.
        scores: ``[n or 1, 1, C]``: 0, or -inf where empty.
    """

    few: FewRows
    entry_owners: FewRows | None
    zeros: torch.Tensor
    sink: torch.Tensor
    window: torch.Tensor
    entries: torch.Tensor | None
    num_entries: int
    empty: torch.Tensor | None
    scores: torch.Tensor


@attrs.frozen(eq=False)
class Plan:
    """``gather`` for some rows; the reference's plan ``dense`` for the ``many`` others."""

    gather: Gather | None
    many: ManyRows | None
    dense: Any


class SparseAttention:
    """``softmax([sink, scale * q k^T]) [0, k]``."""

    def __init__(self, request: SparseAttentionRequest, context: BuildContext) -> None:
        self._request = request
        self._per_block = request.block_size // request.rate if request.rate else 1
        self._reference = context.reference(request)

    def write(self, kv: torch.Tensor, cache: LayerCache, layout: StepLayout) -> None:
        """Write ``kv [T, head_dim]`` at ``layout.slot_mapping``."""
        cache["kv"].view(-1, self._request.head_dim).index_copy_(0, layout.slot_mapping, kv)

    def plan(self, layout: StepLayout, entry_layout: StepLayout | None = None) -> Plan:
        """What each row reads, for all layers of this kind."""
        found = self._plan(layout, entry_layout, FEW_ROWS) or self._plan(layout, entry_layout, 0)
        assert found is not None
        return found

    def _plan(self, layout: StepLayout, entry_layout: StepLayout | None, most: int) -> Plan | None:
        """With requests of up to ``most`` rows gathered; None if that is too much."""
        few, many = split(layout, most)
        entry_few, entry_many = (None, None) if entry_layout is None else split(entry_layout, most)
        gather = None
        if few is not None:
            gather = self._gather(few, entry_few, layout)
            if gather is None:
                return None
        dense = None
        if many is not None:
            dense = self._reference.plan(many.layout, None if entry_many is None else entry_many.layout)
        return Plan(gather, many, dense)

    def _gather(self, few: FewRows, entry_few: FewRows | None, layout: StepLayout) -> Gather | None:
        r, n, position = self._request, len(few.owners), few.positions
        if r.causal:
            first, last = np.maximum(position - r.window + 1, 0), position
        else:
            context = layout.host_seq_lens[few.owners].astype(np.int64)
            first = np.maximum(context - layout.host_query_lens[few.owners] - r.window, 0)
            last = context - 1
        numbers = first[:, None] + np.arange(int((last - first).max()) + 1)
        empty = [np.zeros((n, 1), np.bool_), numbers > last[:, None]]
        entries = None
        count = 0
        if entry_few is not None:
            visible = (position + 1) // r.rate
            count = int(visible.max())
            if r.chosen:
                count = min(count, r.chosen)
                empty.append(np.zeros((n, count), np.bool_))
            else:
                ids = np.arange(count)[None].repeat(n, 0)
                empty.append(ids >= visible[:, None])
                entries = ids
        columns = 1 + numbers.shape[1] + count
        if n * columns * r.head_dim > MOST_GATHERED:
            return None
        hidden = np.concatenate(empty, axis=1)
        ragged = bool(hidden.any())
        scores = np.where(hidden, np.float32(-np.inf), np.float32(0)) if ragged else np.zeros((1, columns), np.float32)
        where = few.cache_rows(np.minimum(numbers, last[:, None]), r.block_size)
        return Gather(
            few=few,
            entry_owners=entry_few,
            zeros=torch.zeros(n, 1, r.head_dim),
            sink=torch.arange(columns)[None] == 0,
            window=torch.from_numpy(where.ravel()),
            entries=None if entries is None or entry_few is None else self._entry_rows(entry_few, entries),
            num_entries=count,
            empty=torch.from_numpy(hidden) if ragged else None,
            scores=torch.from_numpy(scores)[:, None],
        )

    def _entry_rows(self, few: FewRows, ids: Ids) -> torch.Tensor:
        """``[n, e]`` ids -> ``[n * e]`` cache rows; what a row does not see may be any of its request's blocks."""
        return torch.from_numpy(few.cache_rows(ids, self._per_block).ravel())

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
        few = None if plan.gather is None else self._gathered(query, cache, entries, plan.gather, sinks, chosen)
        if plan.many is None:
            return query.new_empty(query.shape) if few is None else few
        picked = None if chosen is None else plan.many.of(chosen)
        many: torch.Tensor = self._reference.run(plan.many.of(query), cache, entries, plan.dense, sinks, picked)
        if few is None or plan.gather is None:
            return many
        return joined((plan.gather.few, few), (plan.many, many))

    def _gathered(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        entries: LayerCache | None,
        gather: Gather,
        sinks: torch.Tensor,
        chosen: torch.Tensor | None,
    ) -> torch.Tensor:
        width = self._request.head_dim
        n = gather.zeros.shape[0]
        scores, empty = gather.scores, gather.empty
        parts = [gather.zeros, cache["kv"].view(-1, width).index_select(0, gather.window).view(n, -1, width)]
        if entries is not None and gather.num_entries:
            where = gather.entries
            if chosen is not None and gather.entry_owners is not None:
                ids = gather.few.of(chosen).numpy()[:, : gather.num_entries]
                if (ids[:, -1] < 0).any():
                    scores, empty = _without(ids < 0, scores, empty)
                where = self._entry_rows(gather.entry_owners, np.maximum(ids, 0))
            assert where is not None
            parts.append(entries["kv"].view(-1, width).index_select(0, where).view(n, -1, width))
        keys = torch.cat(parts, 1)
        if empty is not None:
            # What is not the row's may hold NaN, which no weight of 0 would silence.
            keys.masked_fill_(empty[:, :, None], 0.0)
        base = torch.where(gather.sink, sinks.view(-1, 1), scores)
        products = torch.baddbmm(base, gather.few.of(query), keys.transpose(1, 2), alpha=self._request.scale)
        return torch.bmm(torch.softmax(products, -1), keys)


def _without(missing: Any, scores: torch.Tensor, empty: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The plan's scores and empty places, with the last columns ``missing [n, e]`` empty as well."""
    n, count = missing.shape
    lacking = torch.zeros((n, scores.shape[-1]), dtype=torch.bool) if empty is None else empty.clone()
    lacking[:, -count:] |= torch.from_numpy(missing)
    return scores.masked_fill(lacking[:, None], float("-inf")), lacking
