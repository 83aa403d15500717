"""Log events: one each, with the keys that the manual lists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs
from toys.checkpoints import ToyLLM

from deepinfer_core import SamplingParams

PAGE = (Path(__file__).parents[2] / "docs" / "observability.md").read_text(encoding="utf-8")
SP = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def events() -> Iterator[list[Any]]:
    structlog.reset_defaults()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(0))
    with capture_logs() as entries:
        yield entries
    structlog.reset_defaults()


def named(events: list[Any], name: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in e.items() if k not in ("event", "log_level")} for e in events if e["event"] == name]


def level(events: list[Any], name: str) -> str:
    return next(str(e["log_level"]) for e in events if e["event"] == name)


def documented(name: str) -> set[str]:
    """Keys in the manual's row of an event."""
    row = re.search(rf"^\| `{name}` \|[^|]*\|([^|]*)\|", PAGE, re.MULTILINE)
    assert row is not None, f"{name} is not in docs/observability.md"
    return set(re.findall(r"`(\w+)`", row.group(1)))


def test_the_engine_says_once_what_it_starts_with(events: list[Any], toy_llm: ToyLLM) -> None:
    llm = toy_llm("Count")
    (start,) = named(events, "engine started")
    assert level(events, "engine started") == "info"
    assert set(start) == documented("engine started")
    plan = llm.engine.planned.plan
    assert (start["model"], start["policy"], start["blocks"]) == ("ToyCount", "engine:fcfs", 64)
    assert start["plugins"] == [record.name for record in plan.plugins]
    assert start["fallbacks"] == sum(choice.source == "reference" for choice in plan.choices)


def test_a_request_that_ended_is_one_event(events: list[Any], toy_llm: ToyLLM) -> None:
    output = toy_llm("Count").generate([[1, 2, 3]], SP)[0]
    (end,) = named(events, "request finished")
    assert level(events, "request finished") == "debug"
    assert set(end) == documented("request finished")
    assert (end["request_id"], end["prompt_tokens"], end["output_tokens"]) == (output.request_id, 3, 4)
    assert (end["ttft"], end["tpot"], end["e2e"]) == (output.metrics.ttft, output.metrics.tpot, output.metrics.e2e)
    assert end["reasons"] == ["length"]


def test_a_preemption_is_one_event(events: list[Any], toy_llm: ToyLLM) -> None:
    llm = toy_llm("PrefixHash", kv_cache__num_blocks=11, kv_cache__prefix_cache=False)
    llm.generate([[i, *range(6)] for i in range(4)], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    told = named(events, "request preempted")
    assert len(told) == llm.engine.core.planner.preemption.count > 0
    assert level(events, "request preempted") == "info"
    assert set(told[0]) == documented("request preempted")


def test_a_failure_is_one_event(events: list[Any], toy_llm: ToyLLM) -> None:
    llm = toy_llm("Count")
    llm.engine.model.after = lambda logits: logits * float("nan")  # type: ignore[attr-defined]
    output = llm.generate([[1, 2]], SP)[0]
    assert output.error is not None
    (failed,) = named(events, "request failed")
    assert level(events, "request failed") == "error"
    assert set(failed) == documented("request failed")
    assert (failed["code"], failed["message"]) == (output.error.code, output.error.message)


def test_a_quiet_run_has_no_event_above_debug(events: list[Any], toy_llm: ToyLLM) -> None:
    llm = toy_llm("Count")
    events.clear()
    llm.generate([[1]], SP)
    assert {entry["log_level"] for entry in events} == {"debug"}
