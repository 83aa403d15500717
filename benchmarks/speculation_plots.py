"""Plots of ``speculation.py``'s results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def draw(directory: Path, results: Mapping[str, Any]) -> None:
    """One file for each part that was measured."""
    from matplotlib.figure import Figure

    directory.mkdir(parents=True, exist_ok=True)
    for part, (plot, columns) in PLOTS.items():
        if part in results:
            figure = Figure(figsize=(4 * columns, 3.2), layout="constrained", dpi=80)
            plot(figure.subplots(1, columns), results[part])
            figure.savefig(directory / f"speculation_{part}.png")


def _lengths(axes: Any, found: Mapping[str, Any]) -> None:
    """Mean tokens a round over the kinds, with 5 drafts, and by ratio."""
    for axis, temperature in zip(axes, (0.0, 1.0), strict=True):
        rows = [r for r in found["rows"] if r["temperature"] == temperature and r["drafts"] in (1, 5)]
        names = list(dict.fromkeys(r["drafter"] for r in rows))
        kinds = list(dict.fromkeys(r["kind"] for r in rows))
        for i, kind in enumerate(kinds):
            heights = [next(r["tokens_a_round"] for r in rows if (r["drafter"], r["kind"]) == (n, kind)) for n in names]
            axis.bar([x + 0.27 * (i - 1) for x in range(len(names))], heights, width=0.25, label=kind)
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set_xticks(range(len(names)), names)
        axis.set(title=f"temperature {temperature:g}, 5 drafts", ylabel="tokens a round")
        axis.legend()


def _speed(axes: Any, found: Mapping[str, Any]) -> None:
    rows = found["rows"]
    left, right = axes
    for way in dict.fromkeys(row["way"] for row in rows):
        mine = [row for row in rows if row["way"] == way]
        x = [r["concurrency"] for r in mine]
        left.plot(x, [r["over_none"] for r in mine], marker="o", label=way)
        right.plot(x, [r["budget"] for r in mine], marker="o", label=way)
    left.axhline(0.98, color="grey", linewidth=0.8)
    left.set(xscale="log", xlabel="requests at once", ylabel="tokens/s over no speculation")
    right.set(xscale="log", xlabel="requests at once", ylabel="drafts verified for a request in a step")
    left.legend(fontsize=7)


def _calibration(axes: Any, found: Mapping[str, Any]) -> None:
    """Reliability before and after."""
    for axis, (mode, result) in zip(axes, found.items(), strict=True):
        axis.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
        for name in ("before", "after"):
            said, came = result["points"][name]
            axis.plot(said, came, marker="o", label=f"{name}: {result[name]:.1%}")
        axis.set(title=mode, xlabel="survival said", ylabel="survival found", xlim=(0, 1), ylim=(0, 1))
        axis.legend()


PLOTS = {"length": (_lengths, 2), "speed": (_speed, 2), "calibration": (_calibration, 3)}
