"""Finds tiles for products whose sums must not depend on the number of rows (:mod:`.ops.fixed_linear`), for
:mod:`.tables`.

Into how many parts K is cut is chosen once for a weight, over all numbers of rows; then the tile for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import attrs
import torch

from .measure import microseconds, rotations
from .ops.few_rows import UNIT, Tile, launch, part_length
from .ops.fixed_linear import EACH
from .ops.linear import FEW
from .tables import joined, numbers_of, tile_of
from .tuning import SHARED_BYTES, Shape, Tuner, candidates, library

ROWS = (1, 8, 16, 32, 64, 96, 128, 192, EACH)
"""Numbers of rows that are measured; one between two takes the tile of the larger."""
SPLITS = (1, 2, 3, 4, 8)
WIDE: tuple[list[Any], ...] = (
    [64, 64, 128, 1, 6, 4],
    [64, 128, 128, 1, 4, 4],
    [64, 128, 128, 1, 4, 4, True],
    [64, 128, 64, 1, 4, 4, True],
    [128, 128, 64, 1, 4, 4, True],
    [128, 128, 64, 1, 4, 8, True],
    [128, 128, 128, 1, 3, 8, True],
    [64, 256, 64, 1, 4, 8, True],
    [128, 256, 64, 1, 3, 8, True],
)
"""Tiles of more than :data:`FEW` rows, as a table has them."""


def tiles(rows: int, splits: int, inner: int) -> Iterator[Tile]:
    """Tiles worth trying that cut K into this many parts, all at the same places."""
    if rows <= FEW:
        made: Iterable[Tile] = (tile for tile in candidates(rows) if tile.splits == 1)
    else:
        made = map(tile_of, WIDE)
    for tile in made:
        fits = tile.shared_bytes <= SHARED_BYTES and (rows <= FEW or tile.block_m <= max(128, rows))
        alike = splits == 1 or part_length(inner, splits, tile.block_k) == part_length(inner, splits, UNIT)
        if fits and alike and inner >= 2 * splits * tile.block_k:
            yield attrs.evolve(tile, splits=splits)


def cheapest(times: dict[int, dict[int, float]]) -> int:
    """Of ``splits -> rows -> microseconds`` the one with the least time, each number of rows counting alike.

    Raises:
        ValueError: nothing was measured.
    """
    return min(times, key=lambda splits: sum(math.log(us) for us in times[splits].values()))


class FixedTuner(Tuner):
    """As :class:`.tuning.Tuner`, for sums that are cut alike whatever the rows."""

    def compile_fixed(self, shapes: Iterable[Shape]) -> None:
        """Compile every candidate, many at a time."""
        wanted: dict[tuple[str, Tile], tuple[Shape, int, Tile]] = {}
        for shape in shapes:
            for rows in ROWS:
                for splits in SPLITS:
                    for tile in tiles(rows, splits, shape[1]):
                        alike = attrs.evolve(tile, splits=min(splits, 2))
                        wanted.setdefault((shape[2], alike), (shape, rows, tile))
        self.compile_tiles(wanted.values())

    def best_fixed(self, shape: Shape) -> tuple[list[list[Any]], int, dict[int, float]]:
        """Entries of a table, parts of K, and microseconds by number of rows. A sum that is not cut may be left to
        cuBLAS, where it gives the bits of this package's tiles."""
        times: dict[int, dict[int, float]] = {splits: {} for splits in SPLITS}
        chosen: dict[int, dict[int, Tile | None]] = {splits: {} for splits in SPLITS}
        for rows in ROWS:
            x, weights, out = self._tensors(shape, rows, rotations(2 * shape[0] * shape[1], 8))
            for splits in SPLITS:
                ways: list[tuple[float, Tile | None]] = []
                for tile in tiles(rows, splits, shape[1]):
                    spent = self.microseconds(x, weights, out, tile)
                    ways += [] if spent is None else [(spent, tile)]
                if splits == 1 and ways and self._alike(x, weights[0], out, ways[0][1]):
                    ways.append((microseconds([library(x, weight, out.dtype, False) for weight in weights]), None))
                if ways:
                    times[splits][rows], chosen[splits][rows] = min(ways, key=lambda way: way[0])
        splits = cheapest({cut: found for cut, found in times.items() if len(found) == len(ROWS)})
        entries = joined((rows, None if tile is None else numbers_of(tile)) for rows, tile in chosen[splits].items())
        return entries, splits, times[splits]

    def _alike(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, tile: Tile | None) -> bool:
        """Whether cuBLAS gives this tile's bits."""
        assert tile is not None
        launch(x, weight, None, out, tile, self._arrived)
        return torch.equal(library(x, weight, out.dtype, False)(), out)
