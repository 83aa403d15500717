"""The table of what steps cost: fitted to measured steps, kept as a JSON file, asked by the simulator."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np

from deepinfer_core.api import ConfigError
from deepinfer_core.api.simulation import StepProfile, StepShape

FORMAT: Final = "deepinfer-step-cost"
VERSION: Final = 1
DEFAULT = Path(__file__).with_name("default_cost_table.json")
OUTLIER = 4.0
"""Steps further from the fit than so many times the median deviation are left out of the second fit."""

Array = np.ndarray[Any, Any]


def _points(value: Any) -> Array:
    points = np.array(value, np.float64).reshape(-1, 2)
    points.flags.writeable = False
    return points


@attrs.frozen(kw_only=True, eq=False)
class CostTable:
    """Seconds of a step: a line over its rows, a line over its sampled rows, and a price for each position attended to.

    Attributes:
        rows, sampled: ``[[count, seconds], ...]`` float64, ascending counts; straight between points, continued
            beyond the last with the slope of the last two.
        prefill_context, decode_context: seconds for a position that one row attends to.
        facts: what was measured, on what.
    """

    rows: Array = attrs.field(converter=_points)
    sampled: Array = attrs.field(converter=_points)
    prefill_context: float
    decode_context: float
    facts: Mapping[str, Any] = attrs.field(factory=dict)

    def seconds(self, shape: StepShape) -> float:
        fixed = _line(self.rows, shape.tokens) + _line(self.sampled, shape.sampled)
        return fixed + self.prefill_context * shape.prefill_context + self.decode_context * shape.decode_context

    def decode_seconds(self, rows: int, context: int, steps: int) -> Array:
        fixed = _line(self.rows, rows) + _line(self.sampled, rows) + self.prefill_context * 0
        contexts = context + rows * np.arange(steps)
        seconds: Array = fixed + self.decode_context * contexts
        return seconds


def _line(points: Array, count: int) -> float:
    """Value at ``count`` of the line through ``points``; 0 for none of it."""
    if count == 0:
        return 0.0
    last = len(points) - 1
    i = min(max(int(np.searchsorted(points[:, 0], count)), 1), last)
    if last == 0 or count <= points[0, 0]:
        return float(points[0, 1])
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return float(y0 + (y1 - y0) * (count - x0) / (x1 - x0))


# ---- fit


def fit(profile: StepProfile) -> CostTable:
    """The table that is nearest to the measured steps, by relative error, with no price below zero.

    Rows and sampled rows become lines with a point at each power of two, every one at least as high as the one
    before (a sum of non-negative rises); least squares with non-negative unknowns. Steps that something else
    disturbed are left out by a second fit.
    """
    shapes = [sample.shape for sample in profile.samples]
    seconds = np.array([sample.seconds for sample in profile.samples])
    if len(shapes) < 8:
        raise ConfigError(f"{len(shapes)} measured steps: expected at least 8")
    tokens, sampled = _column(shapes, "tokens"), _column(shapes, "sampled")
    knots, sampled_knots = _knots(tokens), _knots(sampled)
    matrix = np.concatenate(
        [
            _rises(knots, tokens),
            _rises(sampled_knots, sampled)[:, 1:],  # a constant would be told from that of the rows by nothing
            _column(shapes, "prefill_context")[:, None],
            _column(shapes, "decode_context")[:, None],
        ],
        axis=1,
    )
    keep = np.ones(len(seconds), bool)
    for _ in range(2):
        unknowns = _non_negative(matrix[keep], seconds[keep])
        error = matrix @ unknowns / seconds - 1
        deviation = np.abs(error - np.median(error))
        keep = deviation <= OUTLIER * max(float(np.median(deviation)), 1e-3)
    split = len(knots)
    return CostTable(
        rows=np.stack([knots, unknowns[:split].cumsum()], axis=1),
        sampled=np.stack([sampled_knots, np.concatenate([[0], unknowns[split:-2]]).cumsum()], axis=1),
        prefill_context=float(unknowns[-2]),
        decode_context=float(unknowns[-1]),
        facts={
            **profile.facts,
            "steps": len(seconds),
            "left_out": int((~keep).sum()),
            "median_error": float(np.median(np.abs(error))),
            "p90_error": float(np.quantile(np.abs(error), 0.9)),
        },
    )


def _column(shapes: Sequence[StepShape], name: str) -> Array:
    return np.array([getattr(shape, name) for shape in shapes], np.float64)


def _knots(counts: Array) -> Array:
    """1, 2, 4, ... up to the largest count, which is the last one."""
    largest = int(counts.max())
    return np.array(sorted({*(1 << bit for bit in range(largest.bit_length())), largest}), np.float64)


def _rises(knots: Array, counts: Array) -> Array:
    """``[counts, knots]``: a constant, then how far each count has come from each knot to the next, from 0 to 1."""
    if len(knots) == 1:
        return np.ones((len(counts), 1))
    way = (counts[:, None] - knots[None, :-1]) / np.diff(knots)[None]
    return np.concatenate([np.ones((len(counts), 1)), np.clip(way, 0, 1)], axis=1)


def _non_negative(matrix: Array, seconds: Array) -> Array:
    from scipy.optimize import nnls

    scale = np.maximum(np.abs(matrix / seconds[:, None]).max(axis=0), 1e-300)
    unknowns, _ = nnls(matrix / seconds[:, None] / scale, np.ones(len(seconds)))
    result: Array = unknowns / scale
    return result


# ---- file


def write_table(table: CostTable, path: str | Path) -> None:
    data = {
        "format": FORMAT,
        "version": VERSION,
        "facts": dict(table.facts),
        "rows": table.rows.tolist(),
        "sampled": table.sampled.tolist(),
        "prefill_context": table.prefill_context,
        "decode_context": table.decode_context,
    }
    try:
        Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cost table {path}: {error.strerror}") from None


def read_table(path: str | Path) -> CostTable:
    """Read and check a table.

    Raises:
        ConfigError: the file cannot be read or is no cost table; names the field.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cost table {path}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"cost table {path}: not JSON; write one with `deepinfer profile-steps`") from None
    if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (FORMAT, VERSION):
        raise ConfigError(f"cost table {path}: expected format={FORMAT!r} version={VERSION}")
    for name in ("rows", "sampled"):
        _check_points(data.get(name), f"cost table {path}: {name}")
    for name in ("prefill_context", "decode_context"):
        if not _is_number(data.get(name)):
            raise ConfigError(f"cost table {path}: {name}={data.get(name)!r}: expected seconds >= 0")
    return CostTable(
        rows=data["rows"],
        sampled=data["sampled"],
        prefill_context=float(data["prefill_context"]),
        decode_context=float(data["decode_context"]),
        facts=data.get("facts") or {},
    )


def _check_points(points: Any, place: str) -> None:
    pairs = isinstance(points, list) and points and all(isinstance(p, list) and len(p) == 2 for p in points)
    if not pairs or not all(_is_number(value) for point in points for value in point):
        raise ConfigError(f"{place}: expected a list of [count, seconds], numbers >= 0")
    counts = [count for count, _ in points]
    if counts != sorted(set(counts)) or counts[0] < 1:
        raise ConfigError(f"{place}: expected counts from 1 up, ascending")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
