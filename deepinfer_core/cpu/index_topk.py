"""The indexer's choice of entries on the host: all rows of a decode step scored in three products.

Rows that see no more entries than they may choose need no scores: they choose all.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import attrs
import numpy as np
import torch

from deepinfer_core.api import BuildContext, IndexTopKRequest, LayerCache, StepLayout

from .few_rows import FEW_ROWS, MOST_GATHERED, FewRows, Ids, ManyRows, joined, split

Scores: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
LOWEST = np.finfo(np.float32).min


@attrs.frozen(eq=False)
class Gather:
    """What n rows choose from.

    Attributes:
        everything: ``[n, top_k]``, the choice of rows that see few entries; or None, and then:
        keys: ``[n * e]``, cache rows of the entries. visible: ``[n]``, how many a row sees; ``ragged``: not all e.
    """

    few: FewRows
    everything: torch.Tensor | None
    keys: torch.Tensor | None
    visible: Ids
    ragged: bool


@attrs.frozen(eq=False)
class Plan:
    """``gather`` for some rows; the reference's plan ``dense`` for the ``many`` others."""

    gather: Gather | None
    many: ManyRows | None
    dense: Any


class IndexTopK:
    """Scores what a row sees and keeps the best ``top_k``."""

    def __init__(self, request: IndexTopKRequest, context: BuildContext) -> None:
        self._request = request
        self._per_block = request.block_size // request.rate
        self._reference = context.reference(request)

    def plan(self, layout: StepLayout) -> Plan:
        """Which index keys each row sees, for all layers."""
        found = self._plan(layout, FEW_ROWS) or self._plan(layout, 0)
        assert found is not None
        return found

    def _plan(self, layout: StepLayout, most: int) -> Plan | None:
        """With requests of up to ``most`` rows gathered; None if that is too much."""
        few, many = split(layout, most)
        gather = None if few is None else self._gather(few)
        if few is not None and gather is None:
            return None
        return Plan(gather, many, None if many is None else self._reference.plan(many.layout))

    def _gather(self, few: FewRows) -> Gather | None:
        r = self._request
        visible = (few.positions + 1) // r.rate
        count = int(visible.max())
        if count <= r.top_k:
            ids = np.arange(r.top_k)
            return Gather(few, torch.from_numpy(np.where(ids < visible[:, None], ids, -1)), None, visible, False)
        if len(visible) * count * r.head_dim > MOST_GATHERED:
            return None
        keys = few.cache_rows(np.arange(count)[None].repeat(len(visible), 0), self._per_block)
        return Gather(few, None, torch.from_numpy(keys.ravel()), visible, bool((visible < count).any()))

    def run(self, query: torch.Tensor, weights: torch.Tensor, cache: LayerCache, plan: Plan) -> torch.Tensor:
        """``[T, heads, head_dim]`` and ``[T, heads]`` -> ``[T, top_k]`` int64, ascending, -1 last."""
        few = None if plan.gather is None else self._gathered(query, weights, cache, plan.gather)
        if plan.many is None:
            return torch.empty((0, self._request.top_k), dtype=torch.int64) if few is None else few
        many: torch.Tensor = self._reference.run(plan.many.of(query), plan.many.of(weights), cache, plan.dense)
        if few is None or plan.gather is None:
            return many
        return joined((plan.gather.few, few), (plan.many, many))

    def _gathered(self, query: torch.Tensor, weights: torch.Tensor, cache: LayerCache, gather: Gather) -> torch.Tensor:
        if gather.everything is not None or gather.keys is None:
            assert gather.everything is not None
            return gather.everything
        r, n = self._request, len(gather.visible)
        keys = cache["key"].view(-1, r.head_dim).index_select(0, gather.keys).view(n, -1, r.head_dim)
        products = torch.bmm(gather.few.of(query), keys.transpose(1, 2)).relu_()
        shares = gather.few.of(weights)[:, None] * r.scale
        # NaN loses to every number, and is still taken before what cannot be seen.
        scores = np.fmax(torch.bmm(shares, products)[:, 0].numpy(), LOWEST)
        if gather.ragged:
            scores[np.arange(scores.shape[1]) >= gather.visible[:, None]] = -np.inf
        return torch.from_numpy(best(scores, gather.visible, r.top_k))


def best(scores: Scores, visible: Ids, top_k: int) -> Ids:
    """Ids of the ``top_k`` best of ``[n, e]``, ascending, -1 last; of equal ones the lowest.

    ``visible [n]``: how many of a row count; the others are last in it and -inf. e is more than ``top_k``.
    """
    n, count = scores.shape
    least = np.partition(scores, count - top_k, axis=1)[:, count - top_k, None]
    kept = scores >= least
    if np.count_nonzero(kept) == n * top_k:
        # No ties at the edge. A row with less to see has -inf there, which ties with all it does not see.
        ids: Ids = kept.nonzero()[1].reshape(n, top_k)
        return ids
    order = (-scores).argsort(axis=1, kind="stable")[:, :top_k]
    order[np.arange(top_k) >= visible[:, None]] = count
    order.sort(axis=1)
    order[order == count] = -1
    return order
