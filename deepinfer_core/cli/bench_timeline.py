"""A run as a Chrome trace: steps on the host and on the device, and a span for every request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deepinfer_core.engine.request import Request
from deepinfer_core.engine.step_timing import StepTiming

from .bench_run import Run

ENGINE, REQUESTS = 1, 2
HOST, DEVICE = 1, 2


def chrome_trace(run: Run) -> dict[str, Any]:
    """The JSON object format that Perfetto and ``chrome://tracing`` open. Times are microseconds from the start."""
    events = list(_names())
    for step in run.steps:
        events += _step(step, run.start)
    for request in run.requests:
        events += _request(request, run.start)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names() -> Iterator[dict[str, Any]]:
    for process, name in ((ENGINE, "engine"), (REQUESTS, "requests")):
        yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}
    for thread, name in ((HOST, "host"), (DEVICE, "device")):
        yield {"ph": "M", "pid": ENGINE, "tid": thread, "name": "thread_name", "args": {"name": name}}


def _step(step: StepTiming, zero: float) -> Iterator[dict[str, Any]]:
    about = {
        "step": step.number,
        "tokens": step.tokens,
        "prefill": step.prefill,
        "requests": step.requests,
        "output": step.output_tokens,
    }
    spans = (
        ("plan", HOST, step.plan_start, step.plan_end),
        ("launch", HOST, step.plan_end, step.launch_end),
        ("wait", HOST, step.wait_start, step.wait_end),
        ("commit", HOST, step.wait_end, step.commit_end),
        ("device", DEVICE, step.work.start, step.device_end),
    )
    for name, thread, start, end in spans:
        yield {
            "ph": "X",
            "pid": ENGINE,
            "tid": thread,
            "name": name,
            "ts": (start - zero) * 1e6,
            "dur": max(0.0, end - start) * 1e6,
            "args": about,
        }


def _request(request: Request, zero: float) -> Iterator[dict[str, Any]]:
    """A span from arrival to end, with the phases of its waiting and running inside, and marks for the rest."""
    metrics = request.metrics
    common = {"pid": REQUESTS, "tid": 1, "cat": "request", "id": request.request_id}
    bounds = ((metrics.arrival, "b"), (metrics.finished, "e"))
    about = {"prompt": len(request.prompt_token_ids), "output": metrics.output_tokens, "cached": metrics.cached_tokens}
    for when, phase in bounds:
        if when is not None:
            name = f"request {request.request_id}"
            yield {"ph": phase, "name": name, "ts": (when - zero) * 1e6, "args": about, **common}
    phases = (
        ("queue", metrics.arrival, metrics.first_scheduled),
        ("prefill", metrics.first_scheduled, metrics.first_token),
        ("decode", metrics.first_token, metrics.finished),
    )
    for name, start, end in phases:
        if start is not None and end is not None:
            yield {"ph": "b", "name": name, "ts": (start - zero) * 1e6, **common}
            yield {"ph": "e", "name": name, "ts": (end - zero) * 1e6, **common}
    for when, event, detail in metrics.timeline:
        yield {"ph": "n", "name": event, "ts": (when - zero) * 1e6, "args": dict(detail), **common}
