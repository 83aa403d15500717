"""Trying on this machine what its libraries do not promise: that a row's bits do not depend on the rows beside it.

The order in which a kernel adds is chosen by shapes, strides and threads, never by values. One row, repeated n times,
therefore shows for every place among n rows and for every n whether it is always added up alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch

from deepinfer_core.api import PlanError

RowFunction: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""``[n, ...]`` -> ``[n, ...]``, row by row."""

LARGEST_SMALLEST = 16
"""The smallest row count that is usable must be no larger, or a single row would cost too much."""

ENOUGH_RESULTS, MOST_VARIANTS = 4096, 64
"""Narrow operators are tried with several rows: two orders of adding a few numbers often agree."""

COMPANY = (1, 2, 3, 5, 8, 33)
"""Row counts tried where any number of rows will be given."""


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bytes; a NaN equals itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def steady_counts(function: RowFunction, row: torch.Tensor, counts: Sequence[int], what: str) -> tuple[int, ...]:
    """Those of ``counts``, ascending, for which every row gets the bits it gets in the largest.

    Args:
        function: what is tried. row: ``[...]``, one input row of random values.
        what: of what the error speaks.

    Raises:
        PlanError: no small count is among them.
    """
    kept = tuple(counts)
    for variant in _variants(function, row):
        largest = _repeated(function, variant, counts[-1])[0]
        kept = tuple(n for n in kept if _all_rows_are(_repeated(function, variant, n), largest))
    if not kept or kept[0] > LARGEST_SMALLEST:
        raise moved(what, f"row counts with steady bits: {', '.join(map(str, kept)) or 'none'}")
    return kept


def require_steady(function: RowFunction, row: torch.Tensor, what: str, counts: Sequence[int] = COMPANY) -> None:
    """Raise PlanError unless every row gets the same bits among any of these numbers of rows."""
    for variant in _variants(function, row):
        first = _repeated(function, variant, counts[0])[0]
        for n in counts:
            if not _all_rows_are(_repeated(function, variant, n), first):
                raise moved(what, f"{counts[0]} and {n} rows differ")


def moved(what: str, detail: str) -> PlanError:
    """The refusal of a machine that does not keep the promise."""
    libraries = (
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    )
    return PlanError(
        f"features.batch_invariant=true: {what}: on this machine a row's bits change with the rows beside it "
        f"({detail}; {libraries}); run with OMP_NUM_THREADS=1, choose "
        "a provider named by_tiles or rows_alone in ops, or set features.batch_invariant = false"
    )


def random_row(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> torch.Tensor:
    """Normal values, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Operators use ``count`` threads inside, as the engine's will."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(before)


def _variants(function: RowFunction, row: torch.Tensor) -> Iterator[torch.Tensor]:
    """Enough rows that some of their results need rounding where two orders of adding differ."""
    results = _repeated(function, row, 1).numel()
    for number in range(max(1, min(MOST_VARIANTS, ENOUGH_RESULTS // max(results, 1)))):
        yield row.roll(number, -1) * (1 + number / 97)


def _repeated(function: RowFunction, row: torch.Tensor, count: int) -> torch.Tensor:
    return function(row.expand(count, *row.shape).contiguous())


def _all_rows_are(rows: torch.Tensor, row: torch.Tensor) -> bool:
    return same_bits(rows, row.expand_as(rows))
