"""Finds the fastest way to multiply few rows by a weight, for :mod:`.tables`. Needs the GPU it tunes for."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import torch
import triton

from .measure import microseconds, rotations
from .ops.few_rows import AnyTile, Tile, launch
from .ops.held_rows import MOST, PIECE, HeldTile, unit_rows
from .ops.linear import multiplied
from .ops.one_row import OneRowTile
from .ops.swiglu import activate
from .tables import joined, numbers_of

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Numbers of rows that are measured; one between two takes the tile of the larger."""
SHARED_BYTES = 220_000
SPLITS = (1, 2, 3, 4, 8)
NOT_DESCRIBED = 32
"""Rows up to which tiles by tensor descriptors made whole steps slower, though not their products by themselves."""
DESCRIBED = ((64, 128, 5, 4), (64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 5, 4), (256, 128, 3, 8))
"""Of tiles that tensor descriptors bring: rows and columns of a block, most stages, warps."""
ONE_ROW = ((2, 512, 2), (4, 1024, 4), (4, 512, 4))
"""Of tiles for one row: rows and columns of a block of the weight, and warps."""
HELD = ((8, 2, 20, 3, 128), (8, 4, 32, 2, 168))
"""Of tiles whose weight goes straight to the matrix unit: rows of a block, warps, pieces held at most, tiles of the
step's rows ahead, and registers."""
MOST_PIECES = 40
"""Of each warp: they are written out one after the other, and more take the compiler long."""
MARGIN = 1.03
"""cuBLAS must be faster than a tile by this factor: its kernels start only when those before them have ended."""

Shape = tuple[int, int, str]
"""Rows and columns of a weight, and the dtype of the product's result."""


def candidates(rows: int) -> Iterator[Tile]:
    """Tiles worth trying for this number of rows."""
    block_m = next(size for size in (16, 32, 64) if size >= rows)
    for block_n, block_k, stages, warps in (
        (16, 256, 4, 4),
        (16, 512, 3, 4),
        (32, 128, 5, 4),
        (32, 256, 4, 4),
        (64, 64, 6, 4),
        (64, 128, 4, 4),
        (64, 128, 6, 4),
        (64, 256, 3, 4),
        (128, 64, 5, 4),
        (128, 64, 5, 8),
        (128, 128, 4, 8),
    ):
        for splits in SPLITS:
            tile = Tile(block_n=block_n, block_m=block_m, block_k=block_k, splits=splits, stages=stages, warps=warps)
            if tile.shared_bytes <= SHARED_BYTES:
                yield tile
    for block_n, block_k, most, warps in DESCRIBED if rows > NOT_DESCRIBED else ():
        stages = min(most, SHARED_BYTES // (2 * block_k * (block_n + block_m)))
        for splits in SPLITS[:2] if stages > 1 else ():
            yield Tile(
                block_n=block_n,
                block_m=block_m,
                block_k=block_k,
                splits=splits,
                stages=stages,
                warps=warps,
                described=True,
            )


def register_candidates(rows: int, inner: int) -> Iterator[OneRowTile | HeldTile]:
    """Tiles worth trying that hold their part of the weight in registers, each with K in as few parts as it can be, and
    reading little of it for nothing."""
    for block_n, block_k, warps in ONE_ROW if rows == 1 else ():
        ones = (OneRowTile(block_n=block_n, block_k=block_k, splits=splits, warps=warps) for splits in SPLITS)
        fitting = (
            tile
            for tile in ones
            if 24 <= tile.registers(inner) <= 80 and 5 * block_k * tile.splits * tile.turns(inner) <= 6 * inner
        )
        yield from itertools.islice(fitting, 1)
    for block_n, warps, most, ahead, registers in HELD if rows <= MOST else ():
        fewest = HeldTile(block_n=block_n, warps=warps, held=most, splits=1, ahead=ahead, registers=registers)
        for tile in (attrs.evolve(fewest, splits=splits) for splits in SPLITS):
            pieces = tile.pieces(inner)
            if pieces <= MOST_PIECES:
                if 10 * PIECE * warps * tile.splits * pieces <= 11 * inner:
                    yield attrs.evolve(tile, held=min(most, pieces))
                break


def _sensible(tile: Tile, shape: Shape, programs: int, gated: bool) -> bool:
    """Between one wave and about a dozen; parts of at least two steps; whole halves for the matrix unit."""
    if gated and tile.described and (tile.splits > 1 or tile.block_n < 128):
        return False
    count = -(-shape[0] // tile.block_n) * tile.splits
    short = shape[1] < 2 * tile.block_k * tile.splits
    return (
        not short
        and (count >= programs // 2 or tile.splits == SPLITS[-1])
        and (tile.splits == 1 or count < 12 * programs)
    )


class Tuner:
    """Measures shapes of one dtype. Weights of one shape are made once and dropped after it."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self._dtype = dtype
        self._arrived = torch.zeros(1 << 17, dtype=torch.int32, device="cuda")
        self._programs = torch.cuda.get_device_properties(0).multi_processor_count

    def compile(
        self, shapes: Iterable[Shape], rows: Iterable[int] = ROWS, gated: bool = False, held: bool = True
    ) -> None:
        """Compile every candidate in threads of their own; the compiler leaves Python free. ``gated``: products that
        end in a gate, whose weight's shape this is. ``held``: with tiles that hold the weight in registers."""
        wanted: dict[tuple[Any, ...], tuple[Shape, int, AnyTile]] = {}
        for shape in shapes:
            for count in rows:
                for tile in self._candidates(shape, count, gated, held):
                    key: tuple[Any, ...] = (shape[2], attrs.evolve(tile, splits=min(tile.splits, 2)))
                    if isinstance(tile, OneRowTile):
                        key += (tile.turns(shape[1]),)
                    elif isinstance(tile, HeldTile):
                        key += (tile.pieces(shape[1]), unit_rows(count))
                    wanted.setdefault(key, (shape, count, tile))
        self.compile_tiles(wanted.values(), gated)

    def _candidates(self, shape: Shape, rows: int, gated: bool, held: bool) -> Iterator[AnyTile]:
        yield from (tile for tile in candidates(rows) if _sensible(tile, shape, self._programs, gated))
        if held:
            yield from register_candidates(rows, shape[1])

    def compile_tiles(self, wanted: Iterable[tuple[Shape, int, AnyTile]], gated: bool = False) -> None:
        """Compile a tile for a shape and a number of rows, many at a time."""
        made: dict[tuple[Shape, int], Any] = {}
        with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            for shape, rows, tile in wanted:
                if (shape, rows) not in made:
                    made = {(shape, rows): self._tensors(shape, rows, 1)}
                x, weights, out = made[shape, rows]
                launch(x, weights[0], None, out, tile, self._arrived, gated=gated, compile_only=True)

    def best(
        self,
        shape: Shape,
        rows: int,
        gated: bool = False,
        most_splits: int = SPLITS[-1],
        tiles: Iterable[AnyTile] | None = None,
        held: bool = True,
    ) -> dict[str, Any]:
        """``tile`` (None: cuBLAS), its microseconds, and cuBLAS's, with the activation's under ``gated``. Of tiles that
        cut K, those into at most ``most_splits`` parts. ``tiles``: try these and no others. ``held``: as in
        :meth:`compile`."""
        inputs = self._tensors(shape, rows, rotations(2 * shape[0] * shape[1], 8))
        x, weights, out = inputs
        cublas = microseconds([library(x, weight, out.dtype, gated) for weight in weights])
        timed: list[tuple[float, AnyTile | None]] = []
        if tiles is None:
            tiles = self._candidates(shape, rows, gated, held)
        for tile in tiles:
            if tile.splits <= most_splits:
                us = self.microseconds(x, weights, out, tile, gated)
                timed += [] if us is None else [(us, tile)]
        # A small weight may have no tile that is worth trying.
        spent, best = min(timed, key=lambda item: item[0], default=(float("inf"), None))
        chosen = best if spent < MARGIN * cublas else None
        return {"rows": rows, "tile": chosen, "us": min(spent, cublas), "few_rows_us": spent, "cublas_us": cublas}

    def microseconds(
        self, x: torch.Tensor, weights: list[torch.Tensor], out: torch.Tensor, tile: AnyTile, gated: bool = False
    ) -> float | None:
        """Of one product by this tile; None if it does not run on this device."""
        try:
            return microseconds([_few(x, weight, out, tile, self._arrived, gated) for weight in weights])
        except (RuntimeError, triton.runtime.errors.OutOfResources):
            self._arrived.zero_()
            return None

    def _tensors(self, shape: Shape, rows: int, sets: int) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        out, inner, out_dtype = shape
        x = torch.randn(rows, inner, device="cuda").to(self._dtype)
        weights = [torch.randn(out, inner, device="cuda", dtype=self._dtype) for _ in range(sets)]
        return x, weights, torch.empty((rows, out), device="cuda", dtype=getattr(torch, out_dtype))


def library(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, gated: bool) -> Callable[[], Any]:
    """The product by cuBLAS, with the activation behind it under ``gated``."""
    if gated:
        return lambda: activate(torch.nn.functional.linear(x, weight), None)
    return lambda: multiplied(x, weight, None, dtype)


def _few(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, tile: AnyTile, arrived: torch.Tensor, gated: bool
) -> Callable[[], object]:
    return lambda: launch(x, weight, None, out, tile, arrived, gated=gated)


def entries(measured: Iterable[dict[str, Any]]) -> list[list[Any]]:
    """What :meth:`Tuner.best` found for a shape, as a table has it."""
    tiles = ((int(found["rows"]), found["tile"]) for found in measured)
    return joined((rows, None if tile is None else numbers_of(tile)) for rows, tile in tiles)


def save(path: Path, found: dict[str, list[list[Any]]], section: str = "linear") -> None:
    """Add shapes to a section of a table file, or replace them."""
    table: dict[str, Any] = {"linear": {}}
    if path.exists():
        table = json.loads(path.read_text(encoding="utf-8"))
    table.setdefault(section, {}).update(found)
    parts = []
    for name, shapes in sorted(table.items(), reverse=True):
        lines = [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(shapes.items())]
        parts.append(f'  "{name}": {{\n' + ",\n".join(lines) + "\n  }")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
