"""Reliability diagram: how often drafts survived against how often they were said to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_core.api import ConfigError

from .sts import BINS, PLAIN, Array, Records


def points(records: Records, survival: Array) -> tuple[list[float], list[float]]:
    """Means of what was said and of what came true, by bin of the former; empty bins are left out."""
    said, came = records.pairs(survival)
    bins = np.minimum((said * BINS).astype(int), BINS - 1)
    used = [bin_ for bin_ in range(BINS) if (bins == bin_).any()]
    return [float(said[bins == b].mean()) for b in used], [float(came[bins == b].mean()) for b in used]


def check_plot(path: Path) -> None:
    """Whether :func:`draw` can write there: known before anything is generated.

    Raises:
        ConfigError: matplotlib is not installed, knows no such format, or the folder does not exist.
    """
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: its folder does not exist")
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'deepinfer-spec-decode[plot]'") from error
    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in formats:
        raise ConfigError(f"--plot {path}: expected a file name that ends in one of {', '.join(sorted(formats))}")


def draw(path: Path, shown: Mapping[str, tuple[Records, Array]]) -> None:
    """One panel for each verification rule, before and after; ``shown`` has the survival after."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(shown), 4.2), layout="constrained")
    axes: Any = figure.subplots(1, len(shown), squeeze=False)[0]
    for axis, (rule, (records, after)) in zip(axes, shown.items(), strict=True):
        axis.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
        for name, said in (("before", records.survival(PLAIN)), ("after", after)):
            axis.plot(*points(records, said), marker="o", label=f"{name}: error {records.error(said):.1%}")
        axis.set(title=rule, xlabel="survival said", ylabel="survival found", xlim=(0, 1), ylim=(0, 1))
        axis.legend()
    figure.savefig(path)
