"""What each policy prefers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from deepinfer_scheduler.due import due_times, postponed
from deepinfer_scheduler.policies.cache_aware import CacheAware
from deepinfer_scheduler.policies.deadline import Deadline
from deepinfer_scheduler.policies.fair import Fair
from deepinfer_scheduler.policies.latency import FIRST_CHUNK, Latency
from deepinfer_scheduler.policies.priority import Priority
from deepinfer_scheduler.policies.shortest_first import ShortestFirst
from deepinfer_scheduler.policies.throughput import Throughput
from deepinfer_scheduler.ranking import first_k
from deepinfer_scheduler.settings import SchedulerSettings
from deepinfer_scheduler.step_budget import most_tokens
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_core.api import (
    EventKind,
    RequestArrays,
    RequestView,
    SchedulingEvent,
    SystemView,
    TokenSplit,
)

NOW = 100.0
TIMES = ("arrival", "deadline", "ttft_target", "tpot_target")
DEFAULTS = {"prompt": 10, "max_tokens": 10, "arrival": NOW, **dict.fromkeys(TIMES[1:], np.inf)}


def requests(count: int, **columns: Sequence[float] | float) -> RequestArrays:
    """``count`` requests; a column is a list or one value for all."""
    unknown = set(columns) - {field.name for field in attrs.fields(RequestArrays)}
    assert not unknown

    def column(name: str) -> np.ndarray[Any, Any]:
        value = columns.get(name, DEFAULTS.get(name, 0))
        return np.broadcast_to(np.asarray(value, np.float64 if name in TIMES else np.int64), (count,))

    names = [field.name for field in attrs.fields(RequestArrays) if field.name != "ids"]
    return RequestArrays(ids=[str(i) for i in range(count)], **{name: column(name) for name in names})


NOBODY = requests(0)


def system(waiting: RequestArrays = NOBODY, running: RequestArrays = NOBODY, **more: Any) -> SystemView:
    settings = {
        "now": NOW,
        "step": 1,
        "free_blocks": 50,
        "total_blocks": 100,
        "block_size": 16,
        "max_batch_tokens": 512,
        "max_running": 8,
        "tenants": ["a", "b", "c"],
        "step_cost": np.zeros((0, 2)),
        **more,
    }
    return SystemView(waiting=waiting, running=running, **settings)


def event(kind: EventKind, tenant: str, tokens: int = 0) -> SchedulingEvent:
    return SchedulingEvent(kind=kind, request_id="x", time=0.0, tokens=tokens, tenant=tenant)


# ---- ranking


@given(st.lists(st.integers(-5, 5), max_size=40), st.integers(0, 50))
def test_first_k_is_a_stable_sort_cut_off(score: list[int], k: int) -> None:
    assert first_k(np.array(score, np.float64), k) == sorted(range(len(score)), key=lambda i: score[i])[:k]


# ---- priority


def test_priority_goes_by_class_then_by_arrival() -> None:
    view = system(requests(4, arrival=[90, 91, 92, 93], priority=[0, 1, 0, 1]))
    assert Priority().order(view, 4) == [1, 3, 0, 2]
    assert Priority().order(view, 1) == [1]


def test_waiting_is_worth_a_class() -> None:
    waiting = requests(2, arrival=[60, 95], priority=[0, 1])
    assert Priority(SchedulerSettings(priority_ageing_s=30)).order(system(waiting), 2) == [0, 1]
    assert Priority(SchedulerSettings(priority_ageing_s=50)).order(system(waiting), 2) == [1, 0]


def test_the_lowest_class_is_preempted_first_and_in_it_the_newest() -> None:
    assert Priority().victims(system(running=requests(4, priority=[1, 0, 0, 2])), 1) == [2, 1, 0, 3]


# ---- deadline


def test_the_earliest_deadline_is_next() -> None:
    waiting = requests(4, arrival=99, deadline=[130, 110, np.inf, np.inf], ttft_target=[np.inf, np.inf, 5, np.inf])
    view = system(waiting)
    assert due_times(view, 30).tolist() == [130, 110, 104, 129]
    assert Deadline().order(view, 4) == [2, 1, 3, 0]


def test_what_is_late_goes_behind_for_a_while() -> None:
    view = system(requests(3, arrival=[60, 80, 99], deadline=[69, 95, 110]))
    assert postponed(view, due_times(view, 30), 30).tolist() == [99, 125, 110]
    assert Deadline().order(view, 3) == [0, 2, 1]  # the first has been put off long enough


def arriving(prompt: int, deadline: float | None) -> RequestView:
    return RequestView(
        request_id="x", arrival=NOW, prompt_len=prompt, max_tokens=5, priority=0, tenant="a", deadline=deadline,
        ttft_target=None, tpot_target=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("refuse", "deadline", "accepted"),
    [(True, 100.5, False), (True, 101.5, True), (True, 99.0, False), (True, None, True), (False, 99.0, True)],
)
def test_refuses_what_cannot_be_met_when_asked_to(refuse: bool, deadline: float | None, accepted: bool) -> None:
    view = system(step_cost=np.array([[10, 0.2], [100, 1.0]]))
    answer = Deadline(SchedulerSettings(deadline_refuse=refuse)).admit(arriving(100, deadline), view)
    assert answer.accepted is accepted
    assert accepted or answer.reason.startswith("its prompt alone takes 1.000 s, and its deadline is in")


def test_nothing_is_refused_before_a_step_was_measured_unless_it_is_late() -> None:
    policy = Deadline(SchedulerSettings(deadline_refuse=True))
    assert policy.admit(arriving(10**6, 100.1), system()).accepted
    assert not policy.admit(arriving(1, 99.9), system()).accepted


def test_deadline_keeps_the_time_per_token_of_those_that_named_one() -> None:
    cost = np.array([[10, 0.010], [110, 0.110]])
    running = requests(2, output=3, computed=12, tpot_target=[0.05, np.inf])
    assert Deadline().split(system(running=running, step_cost=cost)) == TokenSplit(512, 45 - 2)
    free = requests(2, output=3, computed=12)
    assert Deadline().split(system(running=free, step_cost=cost)) == TokenSplit(512, 512)


def test_the_latest_deadline_is_preempted_first() -> None:
    assert Deadline().victims(system(running=requests(4, deadline=[200, np.inf, 150, np.inf])), 1) == [3, 1, 0, 2]


# ---- fair


def test_the_tenant_served_least_is_next() -> None:
    policy = Fair()
    for tenant in "aab":
        policy.on_event(event("queued", tenant))
    policy.on_event(event("admitted", "a", 100))
    assert policy.order(system(requests(3, tenant=[0, 0, 1])), 3) == [2, 0, 1]


def test_requests_of_one_order_take_turns() -> None:
    view = system(requests(6, tenant=[0, 0, 0, 1, 1, 2]))
    policy = Fair()
    for tenant in "aaabbc":
        policy.on_event(event("queued", tenant))
    assert policy.order(view, 6) == [0, 3, 5, 1, 4, 2]
    assert policy.order(view, 2) == [0, 3]


def test_running_answers_count_as_they_grow() -> None:
    policy = Fair()
    view = system(requests(2, tenant=[0, 1]), requests(2, tenant=[0, 1], output=[5, 4]))
    assert policy.order(view, 2) == [1, 0]


def test_who_was_away_gains_no_credit() -> None:
    policy = Fair()
    policy.on_event(event("queued", "a"))
    policy.on_event(event("admitted", "a", 1000))
    policy.on_event(event("queued", "b"))  # begins where the others are
    policy.on_event(event("queued", "a"))
    policy.on_event(event("admitted", "b", 10))
    policy.on_event(event("queued", "b"))
    assert policy.order(system(requests(2, tenant=[0, 1])), 2) == [0, 1]


def test_the_tenant_served_most_is_preempted_first() -> None:
    policy = Fair()
    view = system(running=requests(4, tenant=[0, 1, 1, 2], output=[9, 3, 3, 1]))
    assert policy.victims(view, 1) == [0, 2, 1, 3]


# ---- by length and by cache


def test_the_longest_cached_prefix_is_next() -> None:
    view = system(requests(4, arrival=[60, 98, 98, 99], prompt=100, cached=[0, 20, 80, 20]))
    assert CacheAware(SchedulerSettings(patience_s=50)).order(view, 4) == [2, 1, 3, 0]
    assert CacheAware(SchedulerSettings(patience_s=30)).order(view, 4) == [0, 2, 1, 3]


def test_the_least_work_is_next() -> None:
    waiting = requests(3, prompt=[100, 50, 300], cached=[0, 0, 290], max_tokens=[10, 40, 10], tenant=[0, 1, 1])
    policy = ShortestFirst(SchedulerSettings(shortest_first_output_weight=4))
    assert policy.order(system(waiting), 3) == [2, 0, 1]
    policy.on_event(event("finished", "b", 2))
    assert policy.order(system(waiting), 3) == [2, 1, 0]
    limit = ShortestFirst(SchedulerSettings(shortest_first_prediction="limit"))
    limit.on_event(event("finished", "b", 2))
    assert limit.order(system(waiting), 3) == [2, 0, 1]


def test_most_output_for_the_least_prompt_is_next() -> None:
    waiting = requests(3, prompt=[100, 100, 400], cached=[0, 50, 0], max_tokens=[10, 10, 400])
    assert Throughput().order(system(waiting), 3) == [2, 1, 0]


@pytest.mark.parametrize(("free", "output", "prefill"), [(4, 3, 0), (5, 3, 512), (4, 0, 512)])
def test_a_nearly_full_cache_takes_nothing_new(free: int, output: int, prefill: int) -> None:
    running = requests(2, output=[3, output], computed=[12, 12 if output else 4])
    view = system(requests(1), running, free_blocks=free)
    assert Throughput().split(view) == TokenSplit(512, prefill)


def test_who_has_least_to_recompute_is_preempted_first() -> None:
    assert Throughput().victims(system(running=requests(3, computed=[30, 10, 20])), 1) == [1, 2, 0]


# ---- latency


@pytest.mark.parametrize(
    ("seconds", "tokens"),
    [(0.005, 0), (0.01, 1), (0.015, 5), (0.02, 10), (0.03, 55), (0.04, 100), (0.05, 145), (9, 500)],
)
def test_the_largest_step_within_a_time(seconds: float, tokens: int) -> None:
    assert most_tokens(np.array([[1, 0.01], [10, 0.02], [100, 0.04]]), seconds, 500) == tokens


def test_a_table_of_one_point_is_a_line_through_nothing() -> None:
    assert most_tokens(np.array([[10, 0.02]]), 0.04, 500) == 20
    assert most_tokens(np.zeros((0, 2)), 0.04, 500) is None


def test_prompts_get_what_decoding_leaves() -> None:
    cost = np.array([[10, 0.010], [110, 0.110]])
    running = requests(4, output=3, computed=12, tpot_target=[0.08, np.inf, 0.06, np.inf])
    settings = SchedulerSettings(latency_tpot_target_ms=100)
    assert Latency(settings).split(system(running=running, step_cost=cost)) == TokenSplit(512, 54 - 4)
    assert Latency(settings).split(system(running=running)) == TokenSplit(512, FIRST_CHUNK)


def test_no_prompt_where_decoding_takes_it_all_unless_patience_is_over() -> None:
    cost = np.array([[10, 0.010], [110, 0.110]])
    running = requests(4, output=3, computed=12, tpot_target=0.02)
    for arrival, prefill in ((NOW - 1, 0), (NOW - 40, 16)):
        view = system(requests(1, arrival=arrival), running, step_cost=cost)
        assert Latency().split(view) == TokenSplit(512, prefill)
