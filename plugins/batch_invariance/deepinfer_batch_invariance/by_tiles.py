"""The reference operators over tiles of rows, for any device and dtype: slower than operators made for a device, and
there for every one.

A tile always has one of a few row counts, tried when the operator is built: a library that chooses its kernel by the
number of rows then chooses alike for each. Where no count gives every row of a tile the same bits, a tile is one row,
whose shape is always the same. Sums are tried before they are rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import attrs
import torch

from deepinfer_core.api import (
    BatchedLinearRequest,
    BuildContext,
    GroupedLinearRequest,
    HyperConnectionRequest,
    HyperHeadRequest,
    LinearRequest,
    RmsNormRequest,
    RopeRequest,
    SwigluRequest,
    WeightPart,
)

from .self_check import random_row, require_steady, threads
from .tiles import Tiles, steady_tiles, widest

COUNTS = (4, 8, 16, 32, 64, 128)
GROUP_ROWS = 16
"""Rows of every group in one product of many groups, where they are steady."""


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of a request's field, which the reference operator has accepted."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


class LinearByTiles:
    """``y = x @ W.T (+ bias)``."""

    def __init__(self, request: LinearRequest, context: BuildContext) -> None:
        self._request, self._context = request, context
        self._reference: Any = context.reference(request)
        self._tiles: Tiles | None = None

    def prepare(self, weights: Sequence[WeightPart], bias: torch.Tensor | None = None) -> Any:
        """As the reference packs; the first weight is tried."""
        weight = self._reference.prepare(weights, bias)
        self._try(weight)
        return weight

    def run(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        """``[M, in_features]`` -> ``[M, out_features]``."""
        # A draft module may run its target's head, which an operator like this one has packed.
        tiles = self._tiles or self._try(weight)
        return tiles.run(lambda part: self._reference.run(part, weight), x)

    def _try(self, weight: Any) -> Tiles:
        if self._tiles is None:
            r = self._request
            row = random_row(r.in_features, dtype=dtype_named(r.dtype), device=self._context.device)
            what = f"gemm of {r.in_features} to {r.out_features} channels in {r.dtype}"
            sums = self._context.reference(attrs.evolve(r, out_dtype=widest(r.dtype)))
            self._tiles = steady_tiles(lambda x: sums.run(x, weight), row, what, self._context.num_threads, COUNTS)
        return self._tiles


class BatchedLinearByTiles:
    """``y[:, g] = x[:, g] @ W[g].T``."""

    def __init__(self, request: BatchedLinearRequest, context: BuildContext) -> None:
        self._request, self._context = request, context
        self._reference: Any = context.reference(request)
        self._tiles: Tiles | None = None

    def prepare(self, weights: Sequence[WeightPart]) -> Any:
        """As the reference packs; the first weight is tried."""
        weight = self._reference.prepare(weights)
        if self._tiles is None:
            r = self._request
            row = random_row(r.groups, r.in_features, dtype=dtype_named(r.dtype), device=self._context.device)
            what = f"gemm of {r.groups} groups of {r.in_features} to {r.out_features} channels"
            sums = self._context.reference(attrs.evolve(r, out_dtype=widest(r.dtype)))
            self._tiles = steady_tiles(lambda x: sums.run(x, weight), row, what, self._context.num_threads, COUNTS)
        return weight

    def run(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        """``[M, groups, in_features]`` -> ``[M, groups, out_features]``."""
        assert self._tiles is not None
        return self._tiles.run(lambda part: self._reference.run(part, weight), x)


class GroupedLinearByTiles:
    """``y[i] = x[i] @ W[group of i].T`` in rounds: in each, every group that has rows left has the same number."""

    def __init__(self, request: GroupedLinearRequest, context: BuildContext) -> None:
        self._request, self._context = request, context
        self._reference: Any = context.reference(request)
        self._rows = 0

    def prepare(self, weights: Sequence[Sequence[WeightPart]]) -> Any:
        """As the reference packs; the first group is tried."""
        weight = self._reference.prepare(weights)
        if not self._rows:
            r = self._request
            row = random_row(r.in_features, dtype=dtype_named(r.dtype), device=self._context.device)
            sums = self._context.reference(attrs.evolve(r, out_dtype=widest(r.dtype)))

            def first_group(x: torch.Tensor) -> torch.Tensor:
                offsets = torch.full((r.groups + 1,), len(x), dtype=torch.int64, device=x.device)
                offsets[0] = 0
                product: torch.Tensor = sums.run(x, offsets, weight)
                return product

            what = f"gemm of an expert's {r.in_features} to {r.out_features} channels"
            (self._rows,) = steady_tiles(first_group, row, what, self._context.num_threads, (GROUP_ROWS,)).counts
        return weight

    def run(self, x: torch.Tensor, offsets: torch.Tensor, weight: Any) -> torch.Tensor:
        """``[N, in_features]`` sorted by group -> ``[N, out_features]``."""
        bounds = offsets.tolist()
        counts = [end - start for start, end in pairwise(bounds)]
        at_once = self._rows
        output: torch.Tensor | None = None
        for done in range(0, max(counts, default=0), at_once):
            busy = [group for group, count in enumerate(counts) if count > done]
            places = [
                range(bounds[g] + done, bounds[g] + min(done + at_once, counts[g])) for g in busy
            ]  # rows of this round
            filled = x.new_zeros((len(busy) * at_once, x.shape[1]))
            for number, rows in enumerate(places):
                filled[number * at_once : number * at_once + len(rows)] = x[rows.start : rows.stop]
            has = torch.zeros(len(counts), dtype=torch.int64)
            has[busy] = at_once
            ends = torch.cat((has.new_zeros(1), has.cumsum(0))).to(offsets.device)
            products = self._reference.run(filled, ends, weight)
            if output is None:
                output = products.new_empty((x.shape[0], products.shape[1]))
            for number, rows in enumerate(places):
                output[rows.start : rows.stop] = products[number * at_once : number * at_once + len(rows)]
        if output is None:
            empty: torch.Tensor = self._reference.run(x, offsets, weight)
            return empty
        return output


class RmsNormByTiles:
    """Norm over the last dimension."""

    def __init__(self, request: RmsNormRequest, context: BuildContext) -> None:
        self._reference: Any = context.reference(request)
        wide = attrs.evolve(request, dtype=widest(request.dtype))
        norms, dtype = context.reference(wide), dtype_named(wide.dtype)
        row = random_row(request.hidden, dtype=dtype, device=context.device)
        weight = torch.ones(request.hidden, dtype=dtype, device=context.device)
        what = f"norm of {request.hidden} channels"
        self._tiles = steady_tiles(lambda x: norms.run(x, weight), row, what, context.num_threads, COUNTS)

    def run(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]`` -> same shape and dtype."""
        rows = x.reshape(-1, x.shape[-1])
        return self._tiles.run(lambda part: self._reference.run(part, weight), rows).view(x.shape)

    def add(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(s), s)`` with ``s = x + residual``."""
        total = x + residual
        return self.run(total, weight), total


class SwigluByTiles:
    """``silu(gate) * up``, each row a stretch of memory of its own where the device is the host."""

    def __init__(self, request: SwigluRequest, context: BuildContext) -> None:
        self._reference: Any = context.reference(request)
        self._device = context.device
        row = random_row(2 * request.width, dtype=dtype_named(request.dtype), device=context.device)
        with threads(context.num_threads):
            require_steady(self.run, row, f"swiglu of {request.width} channels")

    def run(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``[M, 2*width]`` -> ``[M, width]``."""
        if self._device.type != "cpu" or gate_up.shape[0] < 2:
            result: torch.Tensor = self._reference.run(gate_up)
            return result
        return torch.cat([self._reference.run(row) for row in torch.split(gate_up, 1)])


class RopeByTiles:
    """Rotates pairs of channels, each row by itself where the device is the host."""

    def __init__(self, request: RopeRequest, context: BuildContext) -> None:
        self._reference: Any = context.reference(request)
        self._device = context.device
        row = random_row(2, request.head_dim, dtype=dtype_named(request.dtype), device=context.device)

        def turned(x: torch.Tensor) -> torch.Tensor:
            positions = torch.full((len(x),), request.max_positions - 1, dtype=torch.int64, device=x.device)
            return self.run(x, self.plan(positions))

        with threads(context.num_threads):
            require_steady(turned, row, f"rotation of {request.head_dim} channels")

    def plan(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T]`` int64 -> the positions' cos and sin, as ``run`` needs them."""
        if self._device.type != "cpu" or len(positions) < 2:
            found: tuple[torch.Tensor, torch.Tensor] = self._reference.plan(positions)
            return found
        cos, sin = zip(*(self._reference.plan(row) for row in torch.split(positions, 1)), strict=True)
        return torch.cat(cos), torch.cat(sin)

    def run(self, x: torch.Tensor, plan: tuple[torch.Tensor, torch.Tensor], inverse: bool = False) -> torch.Tensor:
        """``[T, heads, head_dim]`` -> same shape; ``inverse`` turns the other way."""
        if self._device.type != "cpu" or x.shape[0] < 2:
            whole: torch.Tensor = self._reference.run(x, plan, inverse)
            return whole
        rows = zip(*(torch.split(part, 1) for part in (x, *plan)), strict=True)
        return torch.cat([self._reference.run(row, (cos, sin), inverse) for row, cos, sin in rows])


class HyperConnectionByTiles:
    """Mixing of streams around a sub-layer."""

    def __init__(self, request: HyperConnectionRequest, context: BuildContext) -> None:
        self._request, self._context = request, context
        self._reference: Any = context.reference(request)
        self._tiles: Tiles | None = None

    def prepare(self, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor) -> Any:
        """As the reference packs; the first weight is tried."""
        weight = self._reference.prepare(fn, base, scale)
        if self._tiles is None:
            r = self._request
            wide = attrs.evolve(r, dtype=widest(r.dtype))
            sums = self._context.reference(wide)
            row = random_row(r.streams, r.hidden, dtype=dtype_named(wide.dtype), device=self._context.device)

            def mixed_and_merged(x: torch.Tensor) -> torch.Tensor:
                output, more = sums.mix(x, weight)
                results = (output, *more, sums.merge(x, output, more))
                return torch.cat([result.flatten(1) for result in results], dim=1)

            # One row at a time on the host, where a vector's last elements take another way than the others.
            counts = (1,) if self._context.device.type == "cpu" else COUNTS
            what = f"hyper-connection of {r.streams} streams of {r.hidden}"
            self._tiles = steady_tiles(mixed_and_merged, row, what, self._context.num_threads, counts)
        return weight

    def mix(self, streams: torch.Tensor, weight: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """``[T, M, hidden]`` -> ``[T, hidden]``, and what merge needs."""
        assert self._tiles is not None

        def mixed(part: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x, more = self._reference.mix(part, weight)
            return (x, *more)

        x, *more = self._tiles.run_all(mixed, (streams,))
        return x, tuple(more)

    def merge(self, streams: torch.Tensor, output: torch.Tensor, mixed: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """``[T, M, hidden]``: the next streams."""
        assert self._tiles is not None

        def merged(part: torch.Tensor, out: torch.Tensor, *more: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (self._reference.merge(part, out, more),)

        (result,) = self._tiles.run_all(merged, (streams, output, *mixed))
        return result


class HyperHeadByTiles:
    """The streams' last sum."""

    def __init__(self, request: HyperHeadRequest, context: BuildContext) -> None:
        self._request, self._context = request, context
        self._reference: Any = context.reference(request)
        self._tiles: Tiles | None = None

    def prepare(self, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor) -> Any:
        """As the reference packs; the first weight is tried."""
        weight = self._reference.prepare(fn, base, scale)
        if self._tiles is None:
            r = self._request
            wide = attrs.evolve(r, dtype=widest(r.dtype))
            sums = self._context.reference(wide)
            row = random_row(r.streams, r.hidden, dtype=dtype_named(wide.dtype), device=self._context.device)
            counts = (1,) if self._context.device.type == "cpu" else COUNTS
            what = f"sum of {r.streams} streams of {r.hidden}"
            self._tiles = steady_tiles(lambda x: sums.run(x, weight), row, what, self._context.num_threads, counts)
        return weight

    def run(self, streams: torch.Tensor, weight: Any) -> torch.Tensor:
        """``[T, M, hidden]`` -> ``[T, hidden]``."""
        assert self._tiles is not None
        return self._tiles.run(lambda part: self._reference.run(part, weight), streams)
