"""Finds the fastest way to multiply by a weight in FP8, for :mod:`.fp8_tables`. Needs the GPU it tunes for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import torch
import triton

from .fp8_tables import Answer, Kind, encoded, fp8_tile
from .measure import microseconds, rotations
from .ops import fp8_few_rows, fp8_hopper
from .ops.few_rows import Tile
from .ops.fp8_hopper import HopperTile
from .ops.fp8_linear import multiply_many
from .ops.fp8_many_rows import ManyTile
from .ops.fp8_weight import Fp8Weight
from .ops.linear import multiplied
from .ops.quantise_rows import quantise_rows
from .ops.widen_weight import widen
from .tables import joined
from .tuning import SHARED_BYTES, Shape

ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 4096)
"""Numbers of rows that are measured; one between two takes the answer of the larger."""
KINDS: tuple[Kind, ...] = ("plain", "rounded")
MOST_FEW = 128
"""Rows up to which tiles of few rows are tried."""
LEAST_MANY = 64
"""Rows from which tiles of many rows are tried."""
SPLITS = (1, 2, 3, 4, 6, 8, 12)
FEW: dict[Kind, tuple[tuple[int, int, int, int, bool], ...]] = {
    "plain": (
        (64, 128, 3, 4, False),
        (64, 128, 3, 4, True),
        (64, 128, 4, 4, True),
        (64, 256, 2, 4, False),
        (64, 256, 3, 4, True),
        (128, 128, 3, 8, False),
        (128, 128, 3, 8, True),
    ),
    "rounded": (
        (64, 128, 4, 4, False),
        (64, 128, 4, 4, True),
        (64, 256, 3, 4, False),
        (64, 256, 3, 4, True),
        (64, 256, 4, 4, False),
        (64, 256, 4, 4, True),
        (128, 128, 4, 4, True),
        (128, 256, 3, 8, False),
    ),
}
"""Columns, inner elements, stages and warps of tiles of few rows, and whether tensor descriptors bring them."""
MANY = tuple(
    ManyTile(block_m=m, block_n=n, halves=halves, stages=stages, warps=warps, each=each, box=box, prefetch=prefetch)
    for m, n, halves, stages, warps, each, box, prefetch in (
        (128, 128, 1, 4, 8, 1, False, True),
        (128, 128, 1, 4, 8, 1, False, False),
        (128, 128, 1, 4, 8, 1, True, True),
        (128, 128, 1, 5, 8, 1, False, True),
        (128, 128, 2, 3, 8, 1, False, True),
        (128, 128, 2, 3, 8, 1, True, False),
        (128, 128, 2, 4, 8, 1, False, False),
        (64, 128, 1, 3, 4, 3, False, True),
        (64, 128, 1, 4, 4, 2, False, True),
        (64, 128, 1, 3, 4, 0, True, True),
        (128, 64, 1, 3, 4, 3, False, True),
        (128, 64, 2, 3, 8, 2, False, False),
    )
)
HOPPER = tuple(
    HopperTile(block_m=m, block_n=n, stages=stages, together=together)
    for m, n, stages, together in (
        (256, 128, 4, 4),
        (256, 128, 4, 8),
        (256, 128, 4, 16),
        (256, 128, 3, 8),
        (192, 128, 4, 4),
        (192, 128, 4, 16),
        (128, 128, 5, 8),
        (128, 128, 5, 16),
        (128, 64, 8, 8),
        (128, 64, 6, 8),
    )
)
"""The same for compute capability 9.0 alone."""


def many_candidates(rows: int) -> tuple[ManyTile | HopperTile, ...]:
    """Tiles of many rows worth trying on this GPU."""
    if not fp8_hopper.usable(torch.device("cuda", torch.cuda.current_device())):
        return MANY
    return (*MANY, *HOPPER) if rows <= MOST_FEW else HOPPER


def few_candidates(kind: Kind, rows: int) -> Iterator[Tile]:
    """Tiles of few rows worth trying."""
    block_m = next(size for size in (16, 32, 64, 128) if size >= min(rows, 128))
    for block_n, block_k, stages, warps, described in FEW[kind]:
        for splits in SPLITS:
            tile = Tile(
                block_n=block_n,
                block_m=block_m,
                block_k=block_k,
                splits=splits,
                stages=stages,
                warps=warps,
                described=described,
            )
            if block_k * (block_n + (2 if kind == "plain" else 1) * block_m) * stages <= SHARED_BYTES:
                yield tile


def sensible(tile: Tile, out_features: int, in_features: int, rows: int, programs: int) -> bool:
    """Enough programs to fill the device, or as many as there can be, none with too short a part of the sum."""
    possible = [splits for splits in SPLITS if splits == 1 or in_features // 128 >= 2 * splits]
    count = triton.cdiv(out_features, tile.block_n) * triton.cdiv(rows, tile.block_m) * tile.splits
    if tile.splits not in possible:
        return False
    return (count >= programs // 2 or tile.splits == possible[-1]) and (tile.splits == 1 or count <= 8 * programs)


class Fp8Tuner:
    """Measures shapes with inputs in bfloat16. Weights of one shape are made once and dropped after it."""

    def __init__(self) -> None:
        self._arrived = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")
        self._programs = torch.cuda.get_device_properties(0).multi_processor_count

    def compile(self, shapes: Iterable[Shape], rows: Iterable[int] = ROWS, tables: bool = False) -> None:
        """Compile every candidate in threads of their own; the compiler leaves Python free. ``tables``: only what the
        package's tables say."""
        done: set[Any] = set()
        with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            for shape in shapes:
                for kind in KINDS:
                    for count in rows:
                        for answer, call in self._calls(kind, shape, count, 1, tables, compile_only=True):
                            numbers: Answer = answer
                            if isinstance(answer, Tile) and answer.splits > 1:
                                numbers = attrs.evolve(answer, splits=2)
                            key = (kind, numbers, shape[0] % 128, shape[2])
                            if key not in done:
                                done.add(key)
                                call[0]()

    def best(self, kind: Kind, shape: Shape, rows: int, tables: bool = False) -> dict[str, Any]:
        """``answer`` as a table has it and its microseconds; for plain rows also ``widened_us``, of cuBLAS's way.
        ``tables``: the answer of the package's tables, instead of the fastest.

        Rounding the rows, which all answers begin with, is not in the times.
        """
        timed: list[tuple[float, Answer]] = []
        sets = rotations(shape[0] * shape[1], 16)
        for answer, calls in self._calls(kind, shape, rows, sets, tables):
            try:
                timed.append((microseconds(calls, rounds=3, target=1000.0), answer))
            except (RuntimeError, triton.runtime.errors.OutOfResources):
                self._arrived.zero_()
        result: dict[str, Any] = {}
        if kind == "plain":
            result["widened_us"] = microseconds(self._widened(shape, rows, sets), rounds=3, target=1000.0)
            if not (tables and timed):
                timed.append((result["widened_us"], None))
        spent, chosen = min(timed, key=lambda item: item[0])
        return {"rows": rows, "answer": encoded(chosen), "us": spent, **result}

    def _calls(
        self, kind: Kind, shape: Shape, rows: int, sets: int, tables: bool, compile_only: bool = False
    ) -> Iterator[tuple[Tile | ManyTile | HopperTile, list[Callable[[], object]]]]:
        out_features, in_features, out_dtype = shape
        weights = made_weights(shape, sets)
        x = torch.randn(rows, in_features, device="cuda").to(torch.bfloat16)
        data, scale = quantise_rows(x) if kind == "rounded" else (x, None)
        out = torch.empty((rows, out_features), device="cuda", dtype=getattr(torch, out_dtype))
        for tile in self._answers(kind, shape, rows, tables):
            if isinstance(tile, Tile):
                yield tile, [self._few(data, scale, w, out, tile, compile_only) for w in weights]
            elif scale is not None:
                yield tile, [_many(data, scale, w, out, tile, compile_only) for w in weights]

    def _answers(self, kind: Kind, shape: Shape, rows: int, tables: bool) -> Iterator[Tile | ManyTile | HopperTile]:
        if tables:
            found = fp8_tile(kind, torch.device("cuda", torch.cuda.current_device()), shape[0], shape[1], rows)
            if found is not None and found != "thumb":
                yield found
            return
        for tile in few_candidates(kind, rows) if rows <= MOST_FEW else ():
            if sensible(tile, shape[0], shape[1], rows, self._programs):
                yield tile
        if kind == "rounded" and rows >= LEAST_MANY:
            yield from many_candidates(rows)

    def _few(
        self,
        x: torch.Tensor,
        scale: torch.Tensor | None,
        weight: Fp8Weight,
        out: torch.Tensor,
        tile: Tile,
        compile_only: bool,
    ) -> Callable[[], object]:
        return lambda: fp8_few_rows.launch(
            x,
            scale,
            weight.data,
            weight.scale,
            weight.rows,
            None,
            out,
            tile,
            self._arrived,
            compile_only=compile_only,
        )

    def _widened(self, shape: Shape, rows: int, sets: int) -> list[Callable[[], object]]:
        x, dtype = torch.randn(rows, shape[1], device="cuda").to(torch.bfloat16), getattr(torch, shape[2])
        return [_widened(x, weight, dtype) for weight in made_weights(shape, sets)]


def _widened(x: torch.Tensor, weight: Fp8Weight, dtype: torch.dtype) -> Callable[[], object]:
    return lambda: multiplied(x, widen(weight, x.dtype), None, dtype)


def _many(
    x: torch.Tensor,
    scale: torch.Tensor,
    weight: Fp8Weight,
    out: torch.Tensor,
    tile: ManyTile | HopperTile,
    compile_only: bool,
) -> Callable[[], object]:
    return lambda: multiply_many(x, scale, weight, out, tile, compile_only=compile_only)


def made_weights(shape: Shape, sets: int) -> list[Fp8Weight]:
    rows, columns, _ = shape
    scale = torch.exp2(torch.randint(-9, 0, (-(-rows // 128), columns // 128), device="cuda").float())
    return [
        Fp8Weight(torch.randn(rows, columns, device="cuda").mul(4).to(torch.float8_e4m3fn), scale, 128, None)
        for _ in range(sets)
    ]


def entries(measured: Iterable[dict[str, Any]]) -> list[list[Any]]:
    """What :meth:`Fp8Tuner.best` found for a shape, as a table has it."""
    return joined((int(found["rows"]), found["answer"]) for found in measured)
