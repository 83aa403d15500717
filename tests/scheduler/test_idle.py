"""The idle report: spans of time against a grid, a made-up timeline with known causes, and a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deepinfer_scheduler import idle
from deepinfer_scheduler.idle import CAUSES, idle_report, read_events, waiting_reports
from hypothesis import given
from hypothesis import strategies as st
from toys.checkpoints import ToyLLM

from deepinfer_core import SamplingParams
from deepinfer_core.api import ConfigError
from deepinfer_core.cli.bench_load import LoadItem
from deepinfer_core.cli.bench_run import run_load
from deepinfer_core.cli.bench_timeline import chrome_trace

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)).map(lambda s: (s[0], s[0] + s[1])), max_size=9)
Spans = list[tuple[int, int]]


def grid(parts: Any) -> np.ndarray[Any, Any]:
    marked = np.zeros(100, bool)
    for start, end in parts:
        marked[int(start) : int(end)] = True
    return marked


@given(spans, spans)
def test_span_arithmetic(first: Spans, second: Spans) -> None:
    a, b = idle._merged(first), idle._merged(second)
    assert (grid(a) == grid(first)).all()
    common = idle._common(a, b)
    assert (grid(common) == (grid(a) & grid(b))).all()
    assert (grid(idle._without(a, common)) == (grid(a) & ~grid(b))).all()
    assert (grid(idle._gaps(a, 0, 100)) == ~grid(a)).all()
    assert idle._length(a) == grid(a).sum()


def span(name: str, start: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "pid": 1, "tid": 1, "name": name, "ts": start * 1e6, "dur": (end - start) * 1e6, "args": {}}


def life(request: str, start: float, end: float) -> list[dict[str, Any]]:
    common = {"pid": 2, "tid": 1, "cat": "request", "id": request, "name": f"request {request}"}
    return [{"ph": "b", "ts": start * 1e6, **common}, {"ph": "e", "ts": end * 1e6, **common}]


def mark(request: str, at: float, event: str, **detail: Any) -> dict[str, Any]:
    return {"ph": "n", "cat": "request", "id": request, "name": event, "ts": at * 1e6, "args": {"child": 0, **detail}}


def test_every_cause_is_told_apart() -> None:
    events = [
        span("plan", 0, 1), span("launch", 1, 2), span("device", 1.5, 5), span("wait", 2, 6), span("commit", 6, 6.5),
        span("plan", 8, 9), span("launch", 9, 9.5), span("device", 9.5, 12), span("wait", 9.5, 12),
        span("commit", 12, 13),
        *life("1", 0, 6.5), *life("2", 7.5, 13),
    ]  # fmt: skip
    report = idle_report(events)
    assert (report.total, report.busy, report.steps) == (13, pytest.approx(6), 2)
    wanted = {"plan": 2, "launch": 1, "wait": 1, "commit": 1.5, "outside the loop": 0.5, "no requests": 1}
    assert report.idle == pytest.approx(wanted)
    assert list(report.idle) == list(CAUSES)


def test_work_behind_the_device_is_no_idle_time() -> None:
    events = [span("device", 0, 4), span("device", 4, 8), span("plan", 1, 2), span("commit", 5, 6), *life("1", 0, 8)]
    report = idle_report(events)
    assert report.busy == report.total == 8
    assert not any(report.idle.values())


def test_why_requests_waited() -> None:
    events = [
        mark("a", 0, "queued"), mark("a", 1, "waiting", reason="a free slot"), mark("a", 4, "admitted"),
        mark("a", 5, "preempted"), mark("a", 5.5, "waiting", reason="free cache blocks"), mark("a", 7, "resumed"),
        mark("a", 9, "finished"), mark("b", 2, "queued"), mark("b", 2.5, "admitted"),
    ]  # fmt: skip
    first, second = waiting_reports(events)
    assert first.request == "a"
    assert first.reasons == pytest.approx(
        {"its turn": 1, "a free slot": 3, "its blocks, after it was preempted": 0.5, "free cache blocks": 1.5}
    )
    assert (second.request, second.reasons) == ("b", pytest.approx({"its turn": 0.5}))


@pytest.fixture
def timeline(toy_llm: ToyLLM, tmp_path: Path) -> Path:
    llm = toy_llm("PrefixHash", kv_cache__num_blocks=9, scheduling__max_running=3)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    load = [LoadItem(prompt={"prompt_token_ids": [i] * 6}, params=params, at=0.0) for i in range(6)]
    run = run_load(llm.engine, load, concurrency=None, progress=lambda finished, tokens: None)
    (tmp_path / "run.json").write_text(json.dumps(chrome_trace(run)))
    return tmp_path / "run.json"


def test_of_a_real_run(timeline: Path) -> None:
    events = read_events(timeline)
    report = idle_report(events)
    assert report.busy + sum(report.idle.values()) == pytest.approx(report.total)
    assert report.idle["plan"] > 0
    assert report.idle["commit"] > 0
    waits = waiting_reports(events)
    assert len(waits) == 6
    assert any("free cache blocks" in waiting.reasons or "a free slot" in waiting.reasons for waiting in waits)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"traceEvents": []}', '{"traceEvents": [{"ph": "X", "name": "plan"}]}']
)
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(ConfigError, match="expected a file of `deepinfer bench --timeline`"):
        read_events(tmp_path / "t")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_events(tmp_path / "none")
