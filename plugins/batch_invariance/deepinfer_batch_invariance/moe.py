"""Routing, and the exchange of rows when all experts are here. Sums run in order of expert id."""

from __future__ import annotations

from typing import Any, TypeAlias

import attrs
import numpy as np
import torch

from deepinfer_core.api import BuildContext, DispatchedRows, MoeExchangeRequest, RouteRequest

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]


class Route:
    """Chooses experts by score (plus bias) and weighs them by score alone; of equal scores the lower id."""

    def __init__(self, request: RouteRequest, context: BuildContext) -> None:
        self._request = request

    def run(
        self,
        logits: torch.Tensor,
        bias: torch.Tensor | None = None,
        given: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T, experts]`` float32 -> ids and weights ``[T, top_k]``."""
        r = self._request
        scores = torch.from_numpy(_scores(logits.numpy(), r.scoring))
        lost = torch.isnan(scores)
        if given is None:
            ranked = scores if bias is None else scores + bias
            ranked = ranked.masked_fill(torch.isnan(ranked), float("-inf"))
            ids = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, : r.top_k]
        else:
            ids = given.to(torch.int64)
        ids = torch.sort(ids, dim=-1).values
        empty = lost.all(-1)
        scores = torch.where(empty[:, None], 1.0, scores.masked_fill(lost, 0.0))
        weights = scores.gather(-1, ids)
        if r.normalise:
            weights = weights / in_order(weights.unbind(-1)).clamp(min=1e-20)[:, None]
        if counts is not None:
            counts[:-1] += torch.bincount(ids.flatten(), minlength=r.experts)
            counts[-1] += empty.sum()
        return ids, weights * r.scale


@np.errstate(over="ignore", invalid="ignore")
def _scores(logits: Array, scoring: str) -> Array:
    """In numpy, whose exponential and logarithm are the same for an element wherever it lies."""
    zero, one = np.float32(0), np.float32(1)
    if scoring == "sqrtsoftplus":
        found: Array = np.sqrt(np.logaddexp(zero, logits))
    elif scoring == "sigmoid":
        found = one / (one + np.exp(-logits))
    else:
        found = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        found /= found.sum(axis=1, keepdims=True)
    return found


def in_order(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The sum of equal shapes, one after the other, fresh memory."""
    total = parts[0].clone()
    for part in parts[1:]:
        total.add_(part)
    return total


@attrs.frozen(eq=False)
class _Handle:
    """``places [T * top_k]``: where each pair of token and expert went."""

    places: torch.Tensor
    tokens: int


class LocalExchange:
    """Every expert is in this process: dispatch sorts, combine adds up in order of expert id. Any device."""

    def __init__(self, request: MoeExchangeRequest, context: BuildContext) -> None:
        self._request = request

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> DispatchedRows:
        """``x [T, hidden]`` -> ``T * top_k`` rows, experts ascending, tokens ascending within an expert."""
        r, flat = self._request, ids.flatten()
        order = torch.sort(flat, stable=True).indices
        counts = torch.bincount(flat, minlength=r.experts)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        return DispatchedRows(
            rows=x.index_select(0, torch.div(order, r.top_k, rounding_mode="floor")),
            weights=weights.flatten().index_select(0, order),
            offsets=torch.cat((counts.new_zeros(1), counts.cumsum(0))),
            handle=_Handle(places, x.shape[0]),
        )

    def combine(self, outputs: torch.Tensor, handle: _Handle) -> torch.Tensor:
        """Each token's rows added in order of expert id, in float32."""
        pairs = outputs.index_select(0, handle.places).to(torch.float32)
        return in_order(pairs.view(handle.tokens, self._request.top_k, self._request.hidden).unbind(1))
