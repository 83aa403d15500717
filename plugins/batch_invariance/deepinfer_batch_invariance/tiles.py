"""Products over fixed numbers of rows: a step's rows are cut into tiles, the last one filled up with zeros."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from deepinfer_core.api import PlanError

from .self_check import RowFunction, steady_counts, threads

COUNTS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Row counts of a tile, as far as this machine's matrix kernels keep a row's bits among them."""

CALL_ROWS = 8
"""What one more call costs, in rows."""

ALIGNMENT = 64
"""Bytes. Memory that a kernel reads begins at a multiple, since some choose their way by it."""


class Tiles:
    """Cuts any number of rows into tiles of the given counts, at the least cost."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(sorted(counts))
        self._cuts = _cheapest(self.counts)

    def cut(self, rows: int) -> tuple[int, ...]:
        """Row counts of the tiles, largest first; together at least ``rows``."""
        largest = self.counts[-1]
        whole, rest = divmod(rows, largest)
        return (largest,) * whole + self._cuts[rest]

    def run(self, function: RowFunction, x: torch.Tensor) -> torch.Tensor:
        """``[n, ...]`` -> what ``function`` makes of every row, fresh memory. n may be 0."""
        (result,) = self.run_all(lambda part: (function(part),), (x,))
        return result

    def run_all(
        self, function: Callable[..., tuple[torch.Tensor, ...]], inputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """The same for several inputs ``[n, ...]`` and several results."""
        rows = inputs[0].shape[0]
        tiles = self.cut(rows)
        if tiles == (rows,):
            return function(*map(_aligned, inputs))
        if len(tiles) == 1:
            return tuple(part[:rows] for part in function(*(_aligned(_filled(x, tiles[0])) for x in inputs)))
        results, start = [], 0
        for count in tiles or self.counts[:1]:
            results.append(function(*(_aligned(_filled(x[start : start + count], count)) for x in inputs)))
            start += count
        if len(results) == 1:  # no rows at all
            return tuple(result[:rows] for result in results[0])
        return tuple(torch.cat(parts)[:rows] for parts in zip(*results, strict=True))


def widest(dtype: str) -> str:
    """The dtype in which the reference operators add up.

    Sums are tried in it: once they are rounded to bfloat16, two orders of adding agree in all but one of some 10,000
    results, which a trial overlooks and a long text does not.
    """
    return "float64" if dtype == "float64" else "float32"


def steady_tiles(
    function: RowFunction, row: torch.Tensor, what: str, num_threads: int, counts: Sequence[int] = COUNTS
) -> Tiles:
    """Tiles of those of ``counts``, ascending, that keep a row's bits, tried with copies of ``row``; else of one row.

    Where the largest counts go another way than small ones, which a single row needs, they are left out.
    """
    with threads(num_threads):
        for most in range(len(counts), 0, -1):
            try:
                return Tiles(steady_counts(function, row, counts[:most], what))
            except PlanError:
                continue
    return Tiles((1,))


def _filled(rows: torch.Tensor, count: int) -> torch.Tensor:
    """``[n, ...]`` with rows of zeros after it, ``[count, ...]``."""
    missing = count - rows.shape[0]
    if not missing:
        return rows
    return torch.constant_pad_nd(rows, [0, 0] * (rows.ndim - 1) + [0, missing])


def _aligned(x: torch.Tensor) -> torch.Tensor:
    if x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _cheapest(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """For every number of rows below the largest count, the tiles that cost least, largest first."""
    costs, cuts = [0], [()]
    found: list[tuple[int, ...]] = list(cuts)
    for rows in range(1, counts[-1]):
        cost, tiles = min(
            (count + CALL_ROWS + costs[max(rows - count, 0)], (count, *found[max(rows - count, 0)])) for count in counts
        )
        costs.append(cost)
        found.append(tuple(sorted(tiles, reverse=True)))
    return found
