"""The figures of a run: percentiles, rates, and where the time of a step went."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .bench_ops import OpTime
from .bench_run import Run
from .output import print_table

COLUMNS = ("median", "p90", "p99", "mean")
_LATENCIES = (
    ("ttft_ms", "time to first token"),
    ("tpot_ms", "time per output token"),
    ("e2e_ms", "request, arrival to end"),
    ("queue_ms", "queue"),
)
_STEPS = (("host_us_per_step", "host time of a step"), ("device_ms_per_step", "device time of a step"))


def figures(run: Run) -> dict[str, Any]:
    """Everything that is reported of a run but the operators; plain data, null where there is nothing to measure."""
    metrics = [request.metrics for request in run.requests]
    failed = [s.error for request in run.requests for s in request.sequences if s.error is not None]
    seconds = run.end - run.start
    output = sum(m.output_tokens for m in metrics)
    prompt = sum(len(request.prompt_token_ids) for request in run.requests)
    host, device = (sum(getattr(s, name) for s in run.steps) for name in ("host_seconds", "device_seconds"))
    return {
        "requests": len(run.requests),
        "failed": len(failed),
        "seconds": seconds,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_second": len(run.requests) / seconds,
        "output_tokens_per_second": output / seconds,
        "total_tokens_per_second": (prompt + output) / seconds,
        "ttft_ms": spread((m.ttft for m in metrics), 1e3),
        "tpot_ms": spread((m.tpot for m in metrics), 1e3),
        "e2e_ms": spread((m.e2e for m in metrics), 1e3),
        "queue_ms": spread((m.queue_time for m in metrics), 1e3),
        "steps": len(run.steps),
        "tokens_per_step": sum(s.tokens for s in run.steps) / max(1, len(run.steps)),
        "host_us_per_step": spread((s.host_seconds for s in run.steps), 1e6),
        "device_ms_per_step": spread((s.device_seconds for s in run.steps), 1e3),
        "host_share": host / (host + device) if host + device else None,
        "cached_tokens": sum(m.cached_tokens for m in metrics),
        "preemptions": sum(m.preemptions for m in metrics),
        "proposed_drafts": sum(m.proposed_drafts for m in metrics),
        "accepted_drafts": sum(m.accepted_drafts for m in metrics),
    }


def spread(values: Iterable[float | None], scale: float) -> dict[str, float] | None:
    """Median, 90th and 99th percentile (linear between ranks) and mean, times ``scale``; None for no value."""
    known = np.array([value for value in values if value is not None], np.float64) * scale
    if not len(known):
        return None
    middle, p90, p99 = np.percentile(known, (50, 90, 99)).tolist()
    return dict(zip(COLUMNS, (middle, p90, p99, float(known.mean())), strict=True))


def op_rows(ops: Sequence[OpTime], device_seconds: float) -> list[dict[str, Any]]:
    """Operators with calls, milliseconds, and share of the device time; then what no operator accounts for."""
    rows: list[dict[str, Any]] = [
        {"slot": row.slot, "op": f"{row.op}.{row.method}", "provider": row.provider, "calls": row.calls,
         "ms": row.seconds * 1e3}
        for row in ops
    ]  # fmt: skip
    rest = device_seconds - sum(row.seconds for row in ops)
    rows.append({"slot": "(rest of the step)", "op": "", "provider": "", "calls": None, "ms": max(0.0, rest) * 1e3})
    total = sum(row["ms"] for row in rows)
    return [row | {"share": row["ms"] / total if total else 0.0} for row in rows]


def print_figures(found: Mapping[str, Any]) -> None:
    counts = [
        ("requests", f"{found['requests']} ({found['failed']} failed)"),
        ("duration", f"{found['seconds']:.2f} s"),
        ("output tokens", f"{found['output_tokens']}, {found['output_tokens_per_second']:.1f}/s"),
        ("all tokens", f"{found['total_tokens_per_second']:.1f}/s"),
        ("from the prefix cache", f"{found['cached_tokens']} of {found['prompt_tokens']} prompt tokens"),
        ("preemptions", found["preemptions"]),
        ("drafts", f"{found['accepted_drafts']} of {found['proposed_drafts']} accepted"),
        ("steps", f"{found['steps']}, {found['tokens_per_step']:.1f} tokens each"),
        ("host share", "" if found["host_share"] is None else f"{found['host_share']:.1%}"),
    ]
    print_table("run", ("what", "value"), counts)
    rows = []
    for key, words in (*_LATENCIES, *_STEPS):
        values = found[key] or {}
        unit = "us" if key.startswith("host") else "ms"
        rows.append((words, unit, *(f"{values[c]:.2f}" if c in values else "" for c in COLUMNS)))
    print_table("times", ("what", "unit", *COLUMNS), rows)


def print_ops(rows: Sequence[Mapping[str, Any]]) -> None:
    cells = [
        (row["slot"], row["op"], row["provider"], row["calls"], f"{row['ms']:.2f}", f"{row['share']:.1%}")
        for row in rows
    ]
    print_table("operators", ("slot", "operator", "provider", "calls", "ms", "share"), cells)
