"""Routing, and the exchange of rows when all experts are here."""

from __future__ import annotations

import attrs
import torch

from deepinfer_core.api import BuildContext, DispatchedRows, MoeExchangeRequest, RouteRequest


class Route:
    """Chooses experts by score (plus bias) and weighs them by score alone."""

    def __init__(self, request: RouteRequest, context: BuildContext) -> None:
        self._request = request

    def run(
        self,
        logits: torch.Tensor,
        bias: torch.Tensor | None = None,
        given: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T, experts]`` -> ids and weights ``[T, top_k]``."""
        r = self._request
        scores = self._scores(logits)
        lost = torch.isnan(scores)
        if given is None:
            ranked = scores if bias is None else scores + bias
            ranked = ranked.masked_fill(torch.isnan(ranked), float("-inf"))
            # A stable sort keeps equal scores in order of id; torch.topk does not.
            ids = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, : r.top_k]
        else:
            ids = given.to(torch.int64)
        ids = torch.sort(ids, dim=-1).values
        empty = lost.all(-1)
        scores = torch.where(empty[:, None], 1.0, scores.masked_fill(lost, 0.0))
        weights = scores.gather(-1, ids)
        if r.normalise:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
        if counts is not None:
            counts[:-1] += torch.bincount(ids.flatten(), minlength=r.experts)
            counts[-1] += empty.sum()
        return ids, weights * r.scale

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        match self._request.scoring:
            case "softmax":
                return torch.softmax(logits, dim=-1)
            case "sigmoid":
                return torch.sigmoid(logits)
            case "sqrtsoftplus":
                return torch.nn.functional.softplus(logits).sqrt()


@attrs.frozen(eq=False)
class _Handle:
    """``order [N]``: place of each dispatched row among the T * top_k pairs."""

    order: torch.Tensor
    tokens: int


class LocalExchange:
    """Every expert is in this process: dispatch sorts, combine adds up."""

    def __init__(self, request: MoeExchangeRequest, context: BuildContext) -> None:
        self._request = request

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> DispatchedRows:
        """``x [T, hidden]`` -> ``T * top_k`` rows, experts ascending, tokens ascending within an expert."""
        flat = ids.flatten()
        order = torch.sort(flat, stable=True).indices
        counts = torch.bincount(flat, minlength=self._request.experts)
        offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        rows = x[torch.div(order, self._request.top_k, rounding_mode="floor")]
        return DispatchedRows(
            rows=rows, weights=weights.flatten()[order], offsets=offsets, handle=_Handle(order, x.shape[0])
        )

    def combine(self, outputs: torch.Tensor, handle: _Handle) -> torch.Tensor:
        """Each token's rows added in order of expert id, in float32."""
        pairs = torch.empty(outputs.shape, dtype=torch.float32, device=outputs.device)
        pairs[handle.order] = outputs.to(torch.float32)
        return added_in_order(pairs.view(handle.tokens, self._request.top_k, self._request.hidden))


def added_in_order(pairs: torch.Tensor) -> torch.Tensor:
    """``[T, top_k, hidden]`` -> ``[T, hidden]``, one after the other, so that a row's bits are its own."""
    total = pairs[:, 0].clone()
    for place in range(1, pairs.shape[1]):
        total += pairs[:, place]
    return total
