"""A picture of a run, drawn with matplotlib, which is an extra (``deepinfer-core[plot]``)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import numpy as np

from .bench_run import Run

SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: str) -> None:
    """Refuse early what could not be drawn after the run.

    Raises:
        click.UsageError: matplotlib is missing, or the file's ending is unknown.
    """
    if Path(path).suffix not in SUFFIXES:
        raise click.UsageError(f"--plot {path}: expected a file ending in {', '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: install it with pip install 'deepinfer-core[plot]'")


def draw(run: Run, path: str) -> None:
    """Distributions of TTFT and TPOT, and host and device time of every step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    _distribution(axes[0], "time to first token", (r.metrics.ttft for r in run.requests))
    _distribution(axes[1], "time per output token", (r.metrics.tpot for r in run.requests))
    at = [step.plan_start - run.start for step in run.steps]
    axes[2].plot(at, [step.device_seconds * 1e3 for step in run.steps], ".", label="device")
    axes[2].plot(at, [step.host_seconds * 1e3 for step in run.steps], ".", label="host")
    axes[2].set(title="steps", xlabel="s", ylabel="ms", yscale="log")
    axes[2].legend()
    figure.savefig(path)


def _distribution(axis: Any, title: str, values: Iterable[float | None]) -> None:
    known = np.sort([value * 1e3 for value in values if value is not None])
    axis.step(known, np.arange(1, len(known) + 1) / max(1, len(known)), where="post")
    axis.set(title=title, xlabel="ms", ylabel="share of requests", ylim=(0, 1.02))
