"""Throughput against speed per user, drawn with matplotlib, which is an extra (``deepinfer-scheduler[plot]``)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

SUFFIXES = (".png", ".svg", ".pdf")
X, Y = "tokens_per_second_per_user", "output_tokens_per_second"


def check_plot(path: str) -> None:
    """Refuse early what could not be drawn after the run.

    Raises:
        click.UsageError: matplotlib or the file's folder is missing, or the file's ending is unknown.
    """
    if Path(path).suffix not in SUFFIXES:
        raise click.UsageError(f"--plot {path}: expected a file ending in {', '.join(SUFFIXES)}")
    if not Path(path).absolute().parent.is_dir():
        raise click.UsageError(f"--plot {path}: its folder does not exist")
    if importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: install it with pip install 'deepinfer-scheduler[plot]'")


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other beats in both, by rising first coordinate; of equal points the first."""
    best, frontier = float("-inf"), []
    for i in sorted(range(len(points)), key=lambda i: (-points[i][0], -points[i][1], i)):
        if points[i][1] > best:
            best = points[i][1]
            frontier.append(i)
    return frontier[::-1]


def draw(rows: Sequence[Mapping[str, Any]], path: str, title: str) -> None:
    """A line per policy through its loads, and the frontier of all."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row[X] is not None and row[Y] is not None]
    figure = Figure(figsize=(7, 5), layout="constrained")
    axis = figure.subplots()
    for policy in dict.fromkeys(row["policy"] for row in rows):
        mine = [row for row in rows if row["policy"] == policy]
        axis.plot([row[X] for row in mine], [row[Y] for row in mine], "o-", label=policy)
    points = [(row[X], row[Y]) for row in rows]
    frontier = [points[i] for i in pareto(points)]
    axis.plot(*zip(*frontier, strict=True), "k--", lw=1, label="frontier") if frontier else None
    axis.set(title=title, xlabel="output tokens per second and user", ylabel="output tokens per second, all users")
    axis.legend()
    figure.savefig(path)
