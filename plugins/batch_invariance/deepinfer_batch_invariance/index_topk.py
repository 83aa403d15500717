"""The indexer's choice of entries on the host: scores in a shape that the row's own position decides, stable choice."""

from __future__ import annotations

import attrs
import numpy as np
import torch

from deepinfer_core.api import BuildContext, IndexTopKRequest, LayerCache, StepLayout

from .attention_check import check_index
from .key_lists import Ids, buckets, room
from .layouts import host_positions
from .listed import Lists, expect_sparse_tensors, lists_of
from .moe import in_order

PIECE = 1 << 20
"""Products computed at a time, so that they stay in the processor's cache."""

LOWEST = np.finfo(np.float32).min


@attrs.frozen(eq=False)
class Group:
    """Rows with equal room for entries: ``rows [n]`` of the step, the ``keys`` of each head, ``visible [n]``."""

    rows: torch.Tensor
    keys: Lists
    visible: Ids


@attrs.frozen(eq=False)
class Plan:
    """``everything [T, top_k]``: the choice of rows that see no more than they may choose; ``groups`` of the others."""

    everything: torch.Tensor
    groups: tuple[Group, ...]


class IndexTopK:
    """Scores what a row sees and keeps the best ``top_k``."""

    def __init__(self, request: IndexTopKRequest, context: BuildContext) -> None:
        self._request = request
        self._per_block = request.block_size // request.rate
        expect_sparse_tensors()
        check_index(self, request, context.num_threads)

    def plan(self, layout: StepLayout) -> Plan:
        """Which index keys each row sees, for all layers."""
        r = self._request
        visible = (host_positions(layout) + 1) // r.rate
        owners = np.repeat(np.arange(len(layout.host_query_lens)), layout.host_query_lens)
        ids = np.arange(r.top_k)
        everything = np.where(ids < visible[:, None], ids, -1)
        table = layout.block_table.numpy().astype(np.int64)
        (scored,) = (visible > r.top_k).nonzero()
        groups = []
        for width, places in buckets(room(visible[scored])):
            at_once = max(1, PIECE // (width * r.heads))
            for start in range(0, len(places), at_once):
                rows = scored[places[start : start + at_once]]
                numbers = np.minimum(np.arange(width), visible[rows, None] - 1)
                block, offset = np.divmod(numbers, self._per_block)
                cached = table[owners[rows, None], block] * self._per_block + offset
                unseen = np.arange(width) >= visible[rows, None]
                groups.append(Group(torch.from_numpy(rows), lists_of(cached, unseen, r.heads), visible[rows]))
        return Plan(torch.from_numpy(everything), tuple(groups))

    def run(self, query: torch.Tensor, weights: torch.Tensor, cache: LayerCache, plan: Plan) -> torch.Tensor:
        """``[T, heads, head_dim]`` and ``[T, heads]`` -> ``[T, top_k]`` int64, ascending, -1 last."""
        r = self._request
        if not plan.groups:
            return plan.everything
        chosen = plan.everything.clone()
        for group in plan.groups:
            n = len(group.visible)
            rows = query.index_select(0, group.rows).reshape(-1, r.head_dim)
            products = group.keys.products(rows, cache["key"].view(-1, r.head_dim), 1.0).relu_().view(n, r.heads, -1)
            shares = weights.index_select(0, group.rows) * r.scale
            summed = in_order((products * shares[:, :, None]).unbind(1))
            # NaN loses to every number, and is still taken before what cannot be seen.
            scores = np.fmax(summed.numpy(), LOWEST)
            scores[np.arange(scores.shape[1]) >= group.visible[:, None]] = -np.inf
            best = (-scores).argsort(axis=1, kind="stable")[:, : r.top_k]
            best.sort(axis=1)
            chosen.index_copy_(0, group.rows, torch.from_numpy(best))
        return chosen
