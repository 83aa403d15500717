"""The lightning indexer's choice of entries, one request at a time."""

from __future__ import annotations

import torch

from deepinfer_core.api import BuildContext, IndexTopKRequest, LayerCache, StepLayout

from .dtypes import widen
from .entries import RequestEntries, request_entries, spans


class IndexTopK:
    """Scores every visible entry and keeps the best ``top_k``."""

    def __init__(self, request: IndexTopKRequest, context: BuildContext) -> None:
        self._request = request

    def plan(self, layout: StepLayout) -> list[RequestEntries]:
        """Which index keys each request reads, and which of them each of its rows sees."""
        return [request_entries(layout, self._request.rate, span) for span in spans(layout)]

    def run(
        self, query: torch.Tensor, weights: torch.Tensor, cache: LayerCache, plan: list[RequestEntries]
    ) -> torch.Tensor:
        """``[T, heads, head_dim]`` and ``[T, heads]`` -> ``[T, top_k]`` int64, ascending, -1 last."""
        chosen = torch.full((query.shape[0], self._request.top_k), -1, dtype=torch.int64, device=query.device)
        for part in plan:
            if len(part.offsets):
                rows = slice(part.start, part.end)
                scores = self.scores(query[rows], weights[rows], cache["key"][part.blocks, part.offsets])
                picks = best(scores, part.visible, self._request.top_k)
                chosen[rows, : picks.shape[1]] = picks
        return chosen

    def scores(self, query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """``[q, heads, head_dim]``, ``[q, heads]``, ``[n, head_dim]`` -> ``[q, n]``."""
        wide = widen(query)
        products = torch.relu(torch.einsum("qhd,nd->qhn", wide, keys.to(wide.dtype)))
        return torch.einsum("qhn,qh->qn", products, weights.to(wide.dtype) * self._request.scale)


def best(scores: torch.Tensor, visible: torch.Tensor, top_k: int) -> torch.Tensor:
    """Ids of the best visible scores, ascending, -1 last: ``[q, min(top_k, n)]``. Equal scores: lowest id first."""
    count = scores.shape[1]
    # NaN loses to every number, and is still taken before what cannot be seen.
    lowest = torch.finfo(scores.dtype).min
    ranked = torch.where(torch.isnan(scores), lowest, scores.clamp(min=lowest))
    ranked = ranked.masked_fill(~visible, float("-inf"))
    picks = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :top_k]
    picks = torch.where(visible.gather(1, picks), picks, count)
    picks = torch.sort(picks, dim=-1).values
    return torch.where(picks == count, -1, picks)
