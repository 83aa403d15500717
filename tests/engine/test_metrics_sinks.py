"""Sinks that block, raise or refuse: the engine goes on, and says so."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import structlog
from metrics_support import PATHS, BlockedSink, ListSink, RaisingSink, samples, value
from structlog.testing import capture_logs
from toys.checkpoints import ToyLLM
from toys.oracle import count_tokens

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.api import PluginError
from deepinfer_core.engine.metrics import SPECS
from deepinfer_core.engine.pump import MAX_FAILURES, Pump

SP = SamplingParams(temperature=0, max_tokens=12)


def watched(toy_llm: ToyLLM, *sinks: str, **settings: Any) -> LLM:
    return toy_llm("Count", logging__metrics=sinks, plugins__paths=PATHS, **settings)


@pytest.fixture(autouse=True)
def _all_levels() -> Any:
    """Engines configure logging only once; here every event must reach ``capture_logs``."""
    structlog.reset_defaults()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(0))
    yield
    structlog.reset_defaults()


# ---- the pump


def test_records_arrive_in_order_in_another_thread() -> None:
    seen: list[int] = []
    threads = set()

    def receive(number: int) -> None:
        seen.append(number)
        threads.add(threading.get_ident())

    pump: Pump[int] = Pump("test", receive, lambda: None)
    for number in range(100):
        pump.put(number)
    pump.close()
    assert seen == list(range(100))
    assert threads.isdisjoint({threading.get_ident()})


def test_what_finds_the_queue_full_is_dropped_and_counted() -> None:
    entered, release, seen = threading.Event(), threading.Event(), []

    def receive(number: int) -> None:
        entered.set()
        release.wait(30)
        seen.append(number)

    pump: Pump[int] = Pump("test", receive, lambda: None, size=2)
    pump.put(0)
    assert entered.wait(30)
    with capture_logs() as logs:
        for number in range(1, 6):
            pump.put(number)
    assert [entry["event"] for entry in logs] == ["records dropped"]
    release.set()
    pump.close()
    assert (seen, pump.dropped) == ([0, 1, 2], 3)


def test_close_is_called_once_after_the_last_record() -> None:
    said: list[Any] = []
    pump: Pump[int] = Pump("test", said.append, lambda: said.append("closed"))
    pump.put(1)
    pump.close()
    pump.close()
    assert said == [1, "closed"]


def test_closing_does_not_wait_for_ever() -> None:
    entered, release = threading.Event(), threading.Event()

    def receive(_: int) -> None:
        entered.set()
        release.wait(30)

    pump: Pump[int] = Pump("test", receive, lambda: None)
    pump.put(0)
    assert entered.wait(30)
    with capture_logs() as logs:
        pump.close(timeout=0.01)
    assert [entry["event"] for entry in logs] == ["receiver did not finish"]
    release.set()


def test_flush_says_whether_everything_arrived() -> None:
    release = threading.Event()
    seen: list[int] = []

    def receive(number: int) -> None:
        release.wait(30)
        seen.append(number)

    pump: Pump[int] = Pump("test", receive, lambda: None)
    pump.put(1)
    assert not pump.flush(timeout=0.01)
    release.set()
    assert pump.flush(timeout=30)
    assert seen == [1]
    pump.close()


def test_a_close_that_raises_is_one_event() -> None:
    def broken() -> None:
        raise OSError("gone")

    pump: Pump[int] = Pump("test", lambda _: None, broken)
    with capture_logs() as logs:
        pump.close()
    (entry,) = logs
    assert (entry["event"], entry["error"]) == ("receiver raised in close", "gone")
    assert entry["exc_info"] is None  # a full disk: a traceback would say nothing


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("a bug")])
def test_only_a_bug_of_the_receiver_is_logged_with_its_traceback(error: Exception) -> None:
    def broken(_: int) -> None:
        raise error

    pump = Pump("test", broken, lambda: None)
    with capture_logs() as logs:
        pump.put(1)
        pump.close()
    (entry,) = logs
    assert (entry["event"], entry["error"]) == ("receiver raised", str(error))
    assert entry["exc_info"] is (None if isinstance(error, OSError) else error)


# ---- sinks in an engine


def test_a_blocked_sink_does_not_hold_up_steps(toy_llm: ToyLLM) -> None:
    BlockedSink.release = threading.Event()
    llm = watched(toy_llm, "blocked")
    outputs = llm.generate([[3], [9]], SP)  # would never return if a step waited for the sink
    sink = BlockedSink.newest
    assert [o.outputs[0].token_ids for o in outputs] == [count_tokens([start], 12, 64) for start in (3, 9)]
    assert sink.records == []
    BlockedSink.release.set()
    llm.close()
    assert sink.total("deepinfer_generation_tokens_total") == 24  # and what it missed came later


def test_a_raising_sink_gets_three_records_and_no_more(toy_llm: ToyLLM) -> None:
    with capture_logs() as logs:
        llm = watched(toy_llm, "raising", "list")
        outputs = llm.generate([[3]], SP)
        llm.close()
    assert outputs[0].outputs[0].token_ids == count_tokens([3], 12, 64)
    assert len(RaisingSink.newest.records) == MAX_FAILURES == 3
    assert RaisingSink.newest.closed == 1
    disabled = [entry for entry in logs if entry["event"] == "receiver disabled"]
    assert [(e["receiver"], e["failures"], e["log_level"]) for e in disabled] == [("sink raising", 3, "error")]


def test_other_sinks_go_on_and_hear_of_the_failures(toy_llm: ToyLLM) -> None:
    llm = watched(toy_llm, "raising", "prometheus")
    for _ in range(3):
        llm.generate([[3]], SP)
        llm.engine.core.observer.metrics.pumps["raising"].flush(30)  # type: ignore[union-attr]
    found = samples(llm.metrics_text())
    assert value(found, "generation_tokens_total") == 36
    assert value(found, "plugin_errors_total", plugin="watchers") == 3


def test_a_step_gives_one_record_and_nothing_else_gives_one(toy_llm: ToyLLM) -> None:
    llm = watched(toy_llm, "list")
    llm.generate([[3]], SP)
    llm.close()
    sink = ListSink.newest
    assert sink.total("deepinfer_steps_total") == 12
    assert sum("deepinfer_steps_total" in record.counters for record in sink.records) == 12
    assert all(record.counters or record.observations for record in sink.records)


def test_records_hold_only_announced_metrics(toy_llm: ToyLLM) -> None:
    llm = watched(toy_llm, "list")
    llm.generate([[3], [4]], SP)
    llm.close()
    sink = ListSink.newest
    assert dict(sink.specs) == dict(SPECS)
    for record in sink.records:
        for kind, part in (("counter", record.counters), ("gauge", record.gauges), ("histogram", record.observations)):
            for key in part:
                name, labels = (key, ()) if isinstance(key, str) else (key[0], key[1:])
                assert SPECS[name].kind == kind
                assert len(SPECS[name].labels) == len(labels)


def test_a_sink_runs_in_one_thread_that_is_not_the_engines(toy_llm: ToyLLM) -> None:
    llm = watched(toy_llm, "list")
    llm.generate([[3]], SP)
    llm.close()
    assert len(ListSink.newest.threads) == 1
    assert threading.get_ident() not in ListSink.newest.threads


def test_a_sink_gets_its_plugins_settings(toy_llm: ToyLLM) -> None:
    watched(toy_llm, "watchers:list")
    assert ListSink.newest.settings is None  # this plugin declares none


@pytest.mark.parametrize(
    ("sink", "said"),
    [
        ("promethus", r"no loaded plugin has sink 'promethus'.*prometheus"),
        ("broken", r"metrics sink 'broken' of plugin 'watchers': ValueError: cannot be made"),
        ("refusing", r"metrics sink 'refusing' of plugin 'watchers': OSError: no such host"),
        ("leaving", r"metrics sink 'leaving' of plugin 'watchers': SystemExit: 3"),
    ],
)
def test_a_sink_that_was_asked_for_and_cannot_be_had_is_an_error(toy_llm: ToyLLM, sink: str, said: str) -> None:
    with pytest.raises(PluginError, match=said):
        watched(toy_llm, sink)
