"""Finds the fastest way to multiply few rows by a weight, for :mod:`.tables`. Needs the GPU it tunes for."""

from __future__ import annotations

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
from .ops.few_rows import Tile, launch
from .tables import TILE_FIELDS

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Numbers of rows that are measured; one between two takes the tile of the larger."""
SHARED_BYTES = 220_000
SPLITS = (1, 2, 4, 8)
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


def _sensible(tile: Tile, shape: Shape, programs: int) -> bool:
    """Between one wave and about a dozen; parts of at least two steps."""
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
        self._arrived = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")
        self._programs = torch.cuda.get_device_properties(0).multi_processor_count

    def compile(self, shapes: Iterable[Shape], rows: Iterable[int] = ROWS) -> None:
        """Compile every candidate in threads of their own; the compiler leaves Python free."""
        shapes, done = list(shapes), set()
        with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            for shape in shapes:
                for count in rows:
                    x, weights, out = self._tensors(shape, count, 1)
                    for tile in candidates(count):
                        key = (attrs.astuple(tile)[:3], tile.splits > 1, tile.stages, tile.warps, shape[2])
                        if key not in done:
                            done.add(key)
                            launch(x, weights[0], None, out, tile, self._arrived, compile_only=True)

    def best(self, shape: Shape, rows: int) -> dict[str, Any]:
        """``tile`` (None: cuBLAS), its microseconds, and cuBLAS's."""
        inputs = self._tensors(shape, rows, rotations(2 * shape[0] * shape[1], 8))
        x, weights, out = inputs
        library = microseconds([_library(x, weight, out.dtype) for weight in weights])
        timed: list[tuple[float, Tile]] = []
        for tile in candidates(rows):
            if not _sensible(tile, shape, self._programs):
                continue
            try:
                timed.append((microseconds([_few(x, w, out, tile, self._arrived) for w in weights]), tile))
            except (RuntimeError, triton.runtime.errors.OutOfResources):
                self._arrived.zero_()
        spent, tile = min(timed, key=lambda item: item[0])
        chosen = tile if spent < MARGIN * library else None
        return {"rows": rows, "tile": chosen, "us": min(spent, library), "few_rows_us": spent, "cublas_us": library}

    def _tensors(self, shape: Shape, rows: int, sets: int) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        out, inner, out_dtype = shape
        x = torch.randn(rows, inner, device="cuda").to(self._dtype)
        weights = [torch.randn(out, inner, device="cuda", dtype=self._dtype) for _ in range(sets)]
        return x, weights, torch.empty((rows, out), device="cuda", dtype=getattr(torch, out_dtype))


def _library(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> Callable[[], object]:
    if dtype == x.dtype:
        return lambda: torch.nn.functional.linear(x, weight)
    return lambda: torch.mm(x, weight.t(), out_dtype=dtype)


def _few(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, tile: Tile, arrived: torch.Tensor
) -> Callable[[], object]:
    return lambda: launch(x, weight, None, out, tile, arrived)


def entries(measured: Iterable[dict[str, Any]]) -> list[list[Any]]:
    """Rows of a table: ``[most rows, tile]`` ascending, neighbours of equal answer joined."""
    made: list[list[Any]] = []
    for answer in sorted(measured, key=lambda item: int(item["rows"])):
        tile: Tile | None = answer["tile"]
        numbers = None if tile is None else [getattr(tile, field) for field in TILE_FIELDS]
        if made and made[-1][1] == numbers:
            made[-1][0] = answer["rows"]
        else:
            made.append([answer["rows"], numbers])
    return made


def save(path: Path, linear: dict[str, list[list[Any]]]) -> None:
    """Add shapes to a table file, or replace them."""
    table: dict[str, Any] = {"linear": {}}
    if path.exists():
        table = json.loads(path.read_text(encoding="utf-8"))
    table["linear"].update(linear)
    lines = [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(table["linear"].items())]
    text = '{\n  "linear": {\n' + ",\n".join(lines) + "\n  }\n}\n"
    path.write_text(text, encoding="utf-8")
