"""``gemm.*`` on the host in float32, over tiles of rows.

Two ways to multiply are known: oneDNN with a reordered weight, and a plain product with a transposed one. The first is
taken whose rows keep their bits on this machine, tried on the layer's own weight when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from deepinfer_core.api import (
    BatchedLinearRequest,
    BuildContext,
    GroupedLinearRequest,
    LinearRequest,
    PlanError,
)

from .huge_pages import move_to_huge_pages
from .self_check import moved, random_row, steady_counts, threads
from .tiles import COUNTS, Tiles

REORDERED_FOR_ROWS = 32
"""Rows that oneDNN chooses its layout for; one layout serves all numbers of rows."""

TRIED_PRODUCT = 1 << 33
"""Multiplications of the largest tile tried: larger weights are multiplied by smaller tiles."""


@attrs.frozen(eq=False)
class Way:
    """A way to multiply: ``pack [out, in]`` once, then ``multiply [n, in]`` with what that gave and the bias."""

    name: str
    pack: Callable[[torch.Tensor], torch.Tensor]
    multiply: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def _reorder(weight: torch.Tensor) -> torch.Tensor:
    reordered: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, REORDERED_FOR_ROWS)
    move_to_huge_pages(reordered)
    return reordered


def _onednn() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """oneDNN's product, without torch's wrapper in Python where it can be had: two microseconds a call."""
    operator = torch.ops.mkldnn._linear_pointwise.default
    multiply = getattr(operator, "_op", operator)

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        result: torch.Tensor = multiply(x, weight, bias, "none", [], "")
        return result

    return product


def _plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def ways() -> list[Way]:
    """What this build of torch has, fastest first."""
    plain = Way("plain", lambda weight: weight.t().contiguous(), _plain)
    if torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return [Way("oneDNN", _reorder, _onednn()), plain]
    return [plain]


@attrs.frozen(eq=False)
class TiledWeight:
    """A packed weight, the way it was packed for, and the tiles it is multiplied by."""

    way: Way
    weight: torch.Tensor
    bias: torch.Tensor | None
    tiles: Tiles

    def times(self, x: torch.Tensor) -> torch.Tensor:
        """``[n, in]`` -> ``[n, out]``."""
        return self.tiles.run(lambda part: self.way.multiply(part, self.weight, self.bias), x)


_CHOSEN: dict[tuple[Any, ...], tuple[Way, Tiles]] = {}
"""Shape and threads -> what was found to be steady. Layers of one shape are tried once a process."""


def packed(weight: torch.Tensor, bias: torch.Tensor | None, num_threads: int) -> TiledWeight:
    """``weight [out, in]`` float32 for tiled products. Raises PlanError when no way is steady on this machine."""
    shape = tuple(weight.shape)
    key = (*shape, bias is None, num_threads)
    with threads(num_threads):
        found = _CHOSEN.get(key)
        if found is None:
            found = _CHOSEN[key] = _choose(weight, bias)
        way, tiles = found
        return TiledWeight(way, way.pack(weight.contiguous()), bias, tiles)


def _times(way: Way, weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return way.multiply(x, weight, bias)


def _choose(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[Way, Tiles]:
    out, inner = weight.shape
    row = random_row(inner)
    counts = [n for n in COUNTS if n <= 16 or n * weight.numel() <= TRIED_PRODUCT]
    what = f"gemm of {inner} to {out} channels"
    refusals = []
    for way in ways():
        ready = way.pack(weight.contiguous())
        try:
            kept = steady_counts(partial(_times, way, ready, bias), row, counts, f"{what}, {way.name}")
        except PlanError as error:
            refusals.append(str(error))
        else:
            return way, Tiles(kept)
    raise moved(what, "; ".join(refusals))


def stacked(weights: Sequence[torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
    """The parts as one float32 ``[out_features, in_features]`` on the host. Raises ValueError for another shape."""
    parts = [part.to("cpu", torch.float32) for part in weights]
    weight = parts[0] if len(parts) == 1 else torch.cat(parts)
    if tuple(weight.shape) != shape:
        raise ValueError(f"linear weight has shape {tuple(weight.shape)}; the request says {shape}")
    return weight


class TiledLinear:
    """``y = x @ W.T (+ bias)``."""

    def __init__(self, request: LinearRequest, context: BuildContext) -> None:
        self._shape = (request.out_features, request.in_features)
        self._threads = context.num_threads

    def prepare(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> TiledWeight:
        """Stack ``[out_i, in_features]`` parts along the output and pack the result; no part is kept."""
        wide = None if bias is None else bias.to("cpu", torch.float32)
        return packed(stacked(weights, self._shape), wide, self._threads)

    def run(self, x: torch.Tensor, weight: TiledWeight) -> torch.Tensor:
        """``[M, in_features]`` float32 -> ``[M, out_features]`` float32."""
        return weight.times(x)


class TiledBatchedLinear:
    """``y[:, g] = x[:, g] @ W[g].T``, one group after the other."""

    def __init__(self, request: BatchedLinearRequest, context: BuildContext) -> None:
        self._request = request
        self._threads = context.num_threads

    def prepare(self, weights: Sequence[torch.Tensor]) -> list[TiledWeight]:
        """Parts that stack to ``[groups * out_features, in_features]``, one packed weight a group."""
        r = self._request
        weight = stacked(weights, (r.groups * r.out_features, r.in_features))
        return [packed(part, None, self._threads) for part in torch.split(weight, r.out_features)]

    def run(self, x: torch.Tensor, weight: list[TiledWeight]) -> torch.Tensor:
        """``[M, groups, in_features]`` float32 -> ``[M, groups, out_features]``."""
        return torch.stack([group.times(x[:, g]) for g, group in enumerate(weight)], dim=1)


class TiledGroupedLinear:
    """``y[i] = x[i] @ W[group of i].T``; each group's rows make tiles of their own."""

    def __init__(self, request: GroupedLinearRequest, context: BuildContext) -> None:
        self._request = request
        self._threads = context.num_threads

    def prepare(self, weights: Sequence[Sequence[torch.Tensor]]) -> list[TiledWeight]:
        """One list of parts a group, each stacking to ``[out_features, in_features]``."""
        r = self._request
        if len(weights) != r.groups:
            raise ValueError(f"{len(weights)} groups of weights; the request says {r.groups}")
        return [packed(stacked(parts, (r.out_features, r.in_features)), None, self._threads) for parts in weights]

    def run(self, x: torch.Tensor, offsets: torch.Tensor, weight: list[TiledWeight]) -> torch.Tensor:
        """``[N, in_features]`` float32 sorted by group -> ``[N, out_features]``."""
        bounds = offsets.numpy()
        (busy,) = (bounds[1:] - bounds[:-1]).nonzero()
        if not len(busy):
            return x.new_empty((0, self._request.out_features))
        products = [weight[g].times(x[bounds[g] : bounds[g + 1]]) for g in busy.tolist()]
        return products[0] if len(products) == 1 else torch.cat(products)
