"""Routing and the local exchange for the host: the small arrays in numpy, whose calls cost less than torch's."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch

from deepinfer_core.api import BuildContext, DispatchedRows, MoeExchangeRequest, RouteRequest


class Route:
    """``sqrtsoftplus`` scores. A step with a NaN among them is the reference's, which defines what then happens."""

    def __init__(self, request: RouteRequest, context: BuildContext) -> None:
        self._request = request
        self._reference = context.reference(request)

    def run(
        self,
        logits: torch.Tensor,
        bias: torch.Tensor | None = None,
        given: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T, experts]`` float32 -> ids and weights ``[T, top_k]``."""
        r = self._request
        scores = np.sqrt(_softplus(logits.numpy()))
        if np.isnan(scores.sum()):
            ids, weights = self._reference.run(logits, bias, given, counts)
            return ids, weights
        if given is None:
            ranked = scores if bias is None else scores + bias.numpy()
            chosen = (-ranked).argsort(axis=1, kind="stable")[:, : r.top_k]
        else:
            chosen = given.numpy().astype(np.int64)
        chosen.sort(axis=1)
        shares = scores[np.arange(len(chosen))[:, None], chosen]
        if r.normalise:
            shares /= np.maximum(shares.sum(axis=1, keepdims=True), np.float32(1e-20))
        shares *= np.float32(r.scale)
        if counts is not None:
            total = counts.numpy()
            total += np.bincount(chosen.ravel(), minlength=r.experts + 1)
        return torch.from_numpy(chosen), torch.from_numpy(shares)


@np.errstate(invalid="ignore")
def _softplus(x: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    soft: np.ndarray[Any, np.dtype[np.float32]] = np.logaddexp(np.float32(0), x)
    return soft


@attrs.frozen(eq=False)
class _Handle:
    """``places [T * top_k]``: where each pair of token and expert went; None: where it was."""

    places: torch.Tensor | None
    tokens: int


class LocalExchange:
    """Every expert is in this process."""

    def __init__(self, request: MoeExchangeRequest, context: BuildContext) -> None:
        self._request = request

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> DispatchedRows:
        """``x [T, hidden]`` -> ``T * top_k`` rows, experts ascending, tokens ascending within an expert."""
        r = self._request
        flat: np.ndarray[Any, np.dtype[np.int64]] = ids.numpy().ravel()
        offsets = np.zeros(r.experts + 1, np.int64)
        np.bincount(flat, minlength=r.experts).cumsum(out=offsets[1:])
        if len(ids) == 1:
            # One token's experts are in order already.
            return DispatchedRows(
                rows=x.expand(r.top_k, -1),
                weights=weights.view(-1),
                offsets=torch.from_numpy(offsets),
                handle=_Handle(None, 1),
            )
        order = flat.argsort(kind="stable")
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        return DispatchedRows(
            rows=x.index_select(0, torch.from_numpy(order // r.top_k)),
            weights=weights.flatten().index_select(0, torch.from_numpy(order)),
            offsets=torch.from_numpy(offsets),
            handle=_Handle(torch.from_numpy(places), x.shape[0]),
        )

    def combine(self, outputs: torch.Tensor, handle: _Handle) -> torch.Tensor:
        """Each token's rows added in order of expert id."""
        pairs = outputs if handle.places is None else outputs.index_select(0, handle.places)
        return pairs.view(handle.tokens, self._request.top_k, self._request.hidden).sum(1)
