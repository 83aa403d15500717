"""The sections of a tuned table, measured one after the other: one that fails leaves the others alone."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deepinfer_core.api import ConfigError

if TYPE_CHECKING:
    from .fp8_tables import Kind

    Fp8Shapes = dict[tuple[Kind, str], tuple[int, int, str]]

Shapes = dict[str, tuple[int, int, str]]
"""``"NxK"`` -> rows and columns of a weight, and the dtype of the product's result."""


class TunedFile:
    """The table file that is written. ``written``: its sections that were added to, in their order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written: list[str] = []

    def add(self, found: dict[str, list[list[Any]]], section: str) -> None:
        """Add shapes to a section, or replace them."""
        from .tuning import save

        save(self.path, found, section)
        if section not in self.written:
            self.written.append(section)


def tune_all(sections: Mapping[str, Callable[[TunedFile], None]], out: TunedFile) -> dict[str, str]:
    """Measure all sections. The names of those that raised, with the error: what these had saved before stays."""
    import torch

    failed: dict[str, str] = {}
    for name, measure in sections.items():
        try:
            measure(out)
        except Exception as error:  # a compiler, a driver, a kernel: whatever it is, the other sections may be sound
            failed[name] = told(error)
            click.echo(f"{name}: failed, going on", err=True)
        if name in failed:  # the error held the section's tensors
            gc.collect()
            torch.cuda.empty_cache()
    return failed


def told(error: Exception) -> str:
    """One line: what it is, what it says, and where it was raised."""
    lines = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {lines} ({Path(frame.filename).name}:{frame.lineno})"


def tune_linear(section: str, shapes: Shapes, out: TunedFile) -> None:
    """``linear``, or ``gated_linear``: few rows by 16-bit weights."""
    from .tuning import ROWS, Tuner, entries

    gated = section == "gated_linear"
    tuner = Tuner()
    click.echo(f"{section}: compiling for {len(shapes)} shapes", err=True)
    tuner.compile(shapes.values(), gated=gated)
    for name, shape in shapes.items():
        measured = [tuner.best(shape, rows, gated) for rows in ROWS]
        out.add({name: entries(measured)}, section)
        gain = [m["cublas_us"] / m["us"] for m in measured]
        click.echo(f"{section} {name}: {min(gain):.2f} to {max(gain):.2f} times as fast as cuBLAS", err=True)


def tune_fixed(shapes: Shapes, gated: Shapes, out: TunedFile) -> None:
    """``fixed_linear`` and ``fixed_gated_linear``: sums in one order, whatever the rows."""
    from .fixed_tuning import FixedTuner
    from .tuning import ROWS, entries

    tuner = FixedTuner()
    click.echo(f"fixed_linear: compiling for {len(shapes | gated)} shapes", err=True)
    tuner.compile_fixed((shapes | gated).values())
    tuner.compile(gated.values(), gated=True, held=False)
    for name, shape in (shapes | gated).items():
        found, splits, times = tuner.best_fixed(shape)
        out.add({name: found}, "fixed_linear")
        spent = ", ".join(f"{rows} rows {us:.1f} us" for rows, us in times.items())
        click.echo(f"fixed_linear {name}: K in {splits} parts, {spent}", err=True)
        if name in gated and splits == 1:
            measured = [tuner.best(shape, rows, True, most_splits=1, held=False) for rows in ROWS]
            out.add({name: entries(measured)}, "fixed_gated_linear")


def tune_fp8(shapes: Fp8Shapes, out: TunedFile) -> None:
    """``fp8_plain`` and ``fp8_rounded``: any number of rows by weights in FP8."""
    from .fp8_tuning import ROWS, Fp8Tuner, entries

    tuner = Fp8Tuner()
    click.echo(f"fp8: compiling for {len(shapes)} shapes", err=True)
    tuner.compile(shapes.values())
    for (kind, name), shape in shapes.items():
        measured = [tuner.best(kind, shape, rows) for rows in ROWS]
        out.add({name: entries(measured)}, f"fp8_{kind}")
        rate = max(2e-6 * shape[0] * shape[1] * m["rows"] / m["us"] for m in measured)
        click.echo(f"{name} in FP8, rows {kind}: up to {rate:.0f} TFLOP/s", err=True)


def tune_between(choices: list[Any], asked: bool, out: TunedFile) -> None:
    """``between_attention``: the products from one attention to the next, where they stand.

    Raises:
        ConfigError: it was ``asked`` for by name, and this plan's cannot be tuned.
    """
    from .between_tuning import ROWS, BetweenTuner, requests_of

    requests = requests_of(choices)
    if requests is None:
        said = "two of its products have one shape, or its attention has a window or sinks: it cannot be tuned"
        if asked:
            raise ConfigError(said)
        click.echo(f"between_attention: {said}", err=True)
        return
    tuner = BetweenTuner(*requests)
    found = {}
    for rows in ROWS.values():
        found[rows], us, by_parts = tuner.best(rows)
        click.echo(f"between_attention, {rows} rows: {us:.1f} us a layer, by its parts {by_parts:.1f}", err=True)
    out.add(tuner.entries(found), "between_attention")
