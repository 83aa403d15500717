"""Cost tables: measured, corrected, kept on disk; and a schedule that stops drafting while it does not pay."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from deepinfer_spec_decode import cost_cache
from deepinfer_spec_decode.cost_table import StepCosts, measure_table
from deepinfer_spec_decode.schedule import PATIENCE, ConfidenceSchedule
from deepinfer_spec_decode.settings import Settings

from deepinfer_core.api import VerifyCost


def cost(rows: int, seconds: float, draft: float = 0.0, drafted: int = 0, decode: bool = True) -> VerifyCost:
    return VerifyCost(
        rows=rows, requests=rows, target_seconds=seconds, draft_seconds=draft, drafted=drafted, decode=decode
    )


def at(costs: StepCosts, *rows: int) -> list[float]:
    return costs(np.array(rows)).tolist()


def test_between_and_beyond_what_was_measured() -> None:
    costs = StepCosts([(1, 1.0), (2, 1.5), (4, 1.4), (8, 3.5)])
    assert at(costs, 1, 2, 3, 4, 6, 8, 10) == pytest.approx([1.0, 1.4, 1.4, 1.4, 2.45, 3.5, 4.55])


def test_measuring_leaves_out_the_fastest_and_the_slowest() -> None:
    times = iter([9.0, 1.0, 5.0, 2.0, 3.0, 4.0])
    assert measure_table(lambda rows: next(times), [1], 1e9) == [(1, 3.0)]


def test_measuring_stops_when_time_or_memory_ends() -> None:
    now = [0.0]

    def measure(rows: int) -> float:
        if rows == 64:
            raise MemoryError
        now[0] += rows
        return float(rows)

    assert [r for r, _ in measure_table(measure, [1, 2, 4, 8, 16], 30.0, lambda: now[0])] == [1, 2]
    assert [r for r, _ in measure_table(measure, [1, 2, 64], 1e9, lambda: now[0])] == [1, 2]


def test_longer_contexts_are_learned() -> None:
    costs = StepCosts([(1, 1.0), (8, 2.0)])
    for _ in range(20):
        costs.observe(cost(4, float(costs.measured(np.array([4]))[0]) + 0.4))
    assert costs.slope == pytest.approx(0.1)
    assert at(costs, 8) == pytest.approx([2.8])
    costs.observe(cost(100, 50.0, decode=False))
    assert costs.slope == pytest.approx(0.1)


def test_drafting_costs_what_it_cost_last() -> None:
    costs = StepCosts([(1, 1.0)])
    assert costs.drafting(3) == 0.0
    for seconds in (0.1, 0.2, 0.3, 5.0, 0.2):
        costs.observe(cost(4, 1.0, seconds, 3))
    assert costs.drafting(3) == 0.2
    assert costs.drafting(4) == 0.2


KEY = {"model": "a", "device": "b"}


def test_the_cache_is_keyed_and_ages(tmp_path: Path) -> None:
    path = tmp_path / cost_cache.file_name(KEY, [1, 2])
    table = [(1, 0.5), (2, 0.75)]
    cost_cache.save(path, KEY, table, clock=lambda: 100.0)
    assert cost_cache.load(path, 10, clock=lambda: 105.0) == table
    assert cost_cache.load(path, 10, clock=lambda: 111.0) is None
    assert cost_cache.file_name({**KEY, "torch": "3"}, [1, 2]) != path.name
    assert cost_cache.file_name(KEY, [1, 2, 3]) != path.name
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"created": 1}', '{"created": 1, "table": [[2, 1], [1, 1]]}'])
def test_a_broken_cache_file_is_measured_again(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    assert cost_cache.load(path, 1e18) is None


def test_the_schedule_measures_once(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.txt"
    foreign.write_text("mine")
    asked: list[int] = []

    def measure(rows: int) -> float:
        asked.append(rows)
        return 0.001 * rows

    settings = Settings(cost_cache=str(tmp_path))
    assert "measured now" in ConfidenceSchedule(settings).start(measure, [1, 2, 4], KEY)
    count = len(asked)
    again = ConfidenceSchedule(settings)
    assert "cached" in again.start(measure, [1, 2, 4], KEY)
    assert len(asked) == count
    assert at(again.costs, 4) == pytest.approx([0.004])
    assert foreign.read_text() == "mine"
    assert json.loads(next(tmp_path.glob("step_costs_*")).read_text())["key"] == KEY


def schedule(probe_steps: int = 8) -> ConfidenceSchedule:
    """One more row costs as much as the first: drafts never pay."""
    made = ConfidenceSchedule(Settings(cost_cache="off", probe_steps=probe_steps))
    made.start(lambda rows: float(rows), [1, 2, 4, 8], KEY)
    return made


def test_drafting_stops_while_it_does_not_pay_and_is_tried_again() -> None:
    made, drafted = schedule(), []
    offered = False
    for _ in range(60):
        if offered:
            assert made.budget(np.full((4, 3), 0.9), np.full(4, 3), 4, delayed=True) == 0
        offered = made.drafts(4)
        drafted.append(offered)
    assert drafted[:PATIENCE] == [True] * PATIENCE
    runs = "".join("x" if d else "." for d in drafted).strip(".").split(".")
    probes = [len(run) for run in runs if run]
    assert len(probes) > 2
    assert all(probe <= PATIENCE + 1 for probe in probes)
    assert drafted.count(False) > 0.5 * len(drafted)


def test_fewer_requests_are_a_new_question() -> None:
    made = schedule(probe_steps=1000)
    for _ in range(PATIENCE):
        made.drafts(16)
        made.budget(np.full((16, 3), 0.9), np.full(16, 3), 16, delayed=True)
    assert not made.drafts(16)
    assert not made.drafts(15)
    assert made.drafts(2)


def test_drafts_that_pay_are_verified() -> None:
    made = ConfidenceSchedule(Settings(cost_cache="off"))
    made.start(lambda rows: 1.0 + 0.01 * rows, [1, 2, 4, 8], KEY)
    for _ in range(20):
        assert made.drafts(1)
        assert made.budget(np.array([[0.9, 0.8, 0.005]]), np.array([3]), 1, delayed=False) == 2
