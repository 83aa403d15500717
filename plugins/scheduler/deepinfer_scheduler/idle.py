"""Reads the Chrome trace of ``deepinfer bench --timeline``: why the device idled, and why requests waited.

The device is idle between the end of a step's work and the start of the next one's. What the host did meanwhile is the
cause: it planned, launched, committed, or had not yet noticed that the step was over; it was outside the loop; or
there was nothing to do, because no request was there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from deepinfer_core.api import ConfigError

CAUSES = ("plan", "launch", "wait", "commit", "outside the loop", "no requests")
Span = tuple[float, float]


@attrs.frozen(kw_only=True)
class IdleReport:
    """Seconds of a run: ``busy`` on the device, and ``idle`` by cause; together they are ``total``."""

    total: float
    busy: float
    steps: int
    idle: Mapping[str, float]


@attrs.frozen(kw_only=True)
class Waiting:
    """Seconds that a request waited, by reason; preemptions included."""

    request: str
    reasons: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.reasons.values())


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """The trace's events.

    Raises:
        ConfigError: the file cannot be read, or holds no steps of an engine.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"timeline {path}: {error.strerror}") from None
    except ValueError:
        data = None
    events = data.get("traceEvents") if isinstance(data, dict) else None
    if not isinstance(events, list) or not any(e.get("name") == "device" and e.get("ph") == "X" for e in events):
        raise ConfigError(f"timeline {path}: expected a file of `deepinfer bench --timeline`")
    return events


def idle_report(events: Sequence[Mapping[str, Any]]) -> IdleReport:
    """From the first step's plan to the last step's commit."""
    spans = [e for e in events if e.get("ph") == "X"]
    start = min(e["ts"] for e in spans)
    end = max(e["ts"] + e["dur"] for e in spans)
    device = _merged((e["ts"], e["ts"] + e["dur"]) for e in spans if e["name"] == "device")
    gaps = list(_gaps(device, start, end))
    idle = dict.fromkeys(CAUSES, 0.0)
    host = {name: _merged((e["ts"], e["ts"] + e["dur"]) for e in spans if e["name"] == name) for name in CAUSES[:4]}
    for name in CAUSES[:4]:
        covered = _common(gaps, host[name])
        idle[name] = _length(covered)
        gaps = list(_without(gaps, covered))
    with_requests = _common(gaps, _merged(_lives(events)))
    idle["outside the loop"] = _length(with_requests)
    idle["no requests"] = _length(gaps) - _length(with_requests)
    return IdleReport(
        total=(end - start) * 1e-6,
        busy=_length(device) * 1e-6,
        steps=sum(e["name"] == "device" for e in spans),
        idle={cause: length * 1e-6 for cause, length in idle.items()},
    )


def waiting_reports(events: Sequence[Mapping[str, Any]]) -> list[Waiting]:
    """Every request of the run, the one that waited longest first.

    A reason counts from when it was noted to when another was, or to when the request was admitted. Completions after
    the first of a request are not told apart: what the first one waits for counts.
    """
    reports = []
    for request, marks in _marks(events).items():
        reasons: dict[str, float] = {}
        since, reason = None, "queued"
        for at, name, about in marks:
            if since is not None:
                reasons[reason] = reasons.get(reason, 0.0) + (at - since) * 1e-6
            if name in ("queued", "preempted"):
                since, reason = at, "its turn" if name == "queued" else "its blocks, after it was preempted"
            elif name == "waiting":
                since, reason = at, str(about.get("reason"))
            elif name in ("admitted", "resumed", "finished"):
                since = None
            elif since is not None:
                since = at
        reports.append(Waiting(request=request, reasons=reasons))
    return sorted(reports, key=lambda waiting: -waiting.seconds)


def _marks(events: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, str, Mapping[str, Any]]]]:
    marks: dict[str, list[tuple[float, str, Mapping[str, Any]]]] = {}
    for event in events:
        if event.get("ph") == "n" and event.get("args", {}).get("child", 0) == 0:
            marks.setdefault(str(event["id"]), []).append((event["ts"], event["name"], event["args"]))
    return marks


def _lives(events: Sequence[Mapping[str, Any]]) -> Iterator[Span]:
    """From each request's arrival to its end."""
    begun: dict[str, float] = {}
    for event in events:
        if event.get("cat") == "request" and str(event["name"]).startswith("request "):
            if event["ph"] == "b":
                begun[event["id"]] = event["ts"]
            elif event["ph"] == "e" and event["id"] in begun:
                yield begun.pop(event["id"]), event["ts"]


# ---- spans of time


def _merged(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def _gaps(spans: Sequence[Span], start: float, end: float) -> Iterator[Span]:
    """What sorted spans leave free between ``start`` and ``end``."""
    at = start
    for begin, stop in spans:
        if begin > at:
            yield at, min(begin, end)
        at = max(at, stop)
    if at < end:
        yield at, end


def _common(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """The time in both of two sorted lists."""
    common, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def _without(spans: Sequence[Span], taken: Sequence[Span]) -> Iterator[Span]:
    """``spans`` less ``taken``, which lies within them."""
    at = 0
    for start, end in spans:
        while at < len(taken) and taken[at][0] < end:
            if taken[at][0] > start:
                yield start, taken[at][0]
            start = taken[at][1]
            at += 1
        if start < end:
            yield start, end


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)
