"""Cost tables: measured, corrected, kept on disk; and a schedule that stops drafting while it does not pay."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from deepinfer_spec_decode import cost_cache
from deepinfer_spec_decode.budget import gain
from deepinfer_spec_decode.cost_table import StepCosts, measure_table
from deepinfer_spec_decode.schedule import PROBE_SHARE, REMEMBERED, ConfidenceSchedule
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


def test_steps_of_one_size_scale_all() -> None:
    costs = StepCosts([(1, 1.0), (8, 2.0)])
    for _ in range(20):
        costs.observe(cost(4, 1.5 * float(costs.measured(np.array([4]))[0])))
    assert at(costs, 1, 8) == pytest.approx([1.5, 3.0])
    for _ in range(20):
        costs.observe(cost(100, 50.0, decode=False))
    assert at(costs, 1, 8) == pytest.approx([1.5, 3.0])


@pytest.mark.parametrize(("factor", "slope"), [(1.7, 0.0), (1.0, 0.2), (2.0, 0.1), (0.8, 0.0)])
def test_a_slower_machine_is_told_from_longer_contexts(factor: float, slope: float) -> None:
    costs = StepCosts([(1, 1.0), (8, 1.5), (64, 4.0)])
    rng = np.random.default_rng()
    for _ in range(300):
        rows = int(rng.choice([1, 3, 6, 20]))
        true = factor * float(costs.measured(np.array([rows]))[0]) + slope * rows
        costs.observe(cost(rows, true * rng.choice([0.99, 1.0, 1.01, 5.0], p=[0.25, 0.4, 0.25, 0.1])))
    for rows in (2, 40):
        true = factor * float(costs.measured(np.array([rows]))[0]) + slope * rows
        assert at(costs, rows) == pytest.approx([true], rel=0.03)


def test_more_rows_are_never_credited() -> None:
    """Larger steps that were quicker than measured show noise, not rows that cost less than nothing."""
    costs = StepCosts([(1, 1.0), (4, 2.0)])
    for _ in range(20):
        costs.observe(cost(1, 2.0))
        costs.observe(cost(4, 1.9))
    assert at(costs, 4)[0] > at(costs, 1)[0]


def test_drafting_costs_what_it_cost_last() -> None:
    costs = StepCosts([(1, 1.0)])
    assert costs.drafting(3) == 0.0
    for seconds in (9.0, 0.1, 0.2, 0.3, 5.0, 0.2):
        assert costs.drafting(3) < 1.0  # the first time does not count
        costs.observe(cost(4, 1.0, seconds, 3))
    assert costs.drafting(3) == 0.2
    assert costs.drafting(4) == 0.2


def test_drafting_for_other_numbers_scales_as_steps_do() -> None:
    costs = StepCosts([(1, 1.0), (4, 2.0), (16, 8.0)])
    for rows, seconds in ((2, 9.0), (4, 0.5), (1, 0.3)):
        costs.observe(cost(rows, 1.0, seconds, rows))
    assert costs.drafting(5) == pytest.approx(0.5 * 2.5 / 2.0)
    assert costs.drafting(16) == pytest.approx(0.5 * 8.0 / 2.0)
    assert costs.drafting(1) == 0.3


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


def schedule(milliseconds: Callable[[int], float], probe_steps: int = 8) -> ConfidenceSchedule:
    made = ConfidenceSchedule(Settings(cost_cache="off", probe_steps=probe_steps))
    made.start(lambda rows: milliseconds(rows) / 1000, [1, 2, 4, 8, 16, 32, 64], KEY)
    return made


def run(made: ConfidenceSchedule, requests: int, chance: float, steps: int, drafting: float = 0.1) -> str:
    """Which of the steps drafted: ``x`` or ``.``; drafts are ready one step later."""
    drafted = ""
    for _ in range(steps):
        if drafted.endswith("x"):
            survival = np.cumprod(np.full((requests, 3), chance), axis=1)
            made.budget(survival, np.full(requests, 3), requests, delayed=True)
        drafted += "x" if made.drafts(requests) else "."
        seconds = float(made.costs.measured(np.array([requests]))[0])
        made.observe(cost(requests, seconds, drafting / 1000, requests if drafted[-1] == "x" else 0))
    return drafted


@pytest.mark.parametrize("requests", [1, 2, 4, 64])
def test_drafting_stops_at_once_and_is_probed(requests: int) -> None:
    """One more row costs as much as the first: drafts never pay."""
    drafted = run(schedule(float), requests, 0.9, 300)
    assert drafted.startswith("x.")
    probes = [len(part) for part in drafted[1:].split(".") if part]
    assert probes
    assert set(probes) == {1}
    assert drafted.count("x") < 0.15 * len(drafted)


def test_probes_take_a_bounded_share_of_the_time() -> None:
    """Drafting as long as a step: the pause is as long as its share asks, whatever ``probe_steps`` says."""
    drafted = run(schedule(float, probe_steps=1), 4, 0.5, 1000, drafting=4.0)
    assert 2 < drafted.count("x") <= 3 + PROBE_SHARE * len(drafted)


def test_what_pays_again_is_found_by_probes() -> None:
    made = schedule(lambda rows: 1 + 0.2 * rows)
    assert run(made, 1, 0.1, 200)[-8:].count("x") <= 1
    assert run(made, 1, 0.99, 60).endswith("x" * 2 * REMEMBERED)


def test_fewer_requests_are_another_question() -> None:
    """Steps of up to 8 rows cost the same: 16 requests do not pay, 2 do, with what is known already."""
    made = schedule(lambda rows: float(max(rows, 8)), probe_steps=1000)
    assert run(made, 16, 0.9, 20) == "x" + "." * 19
    assert not made.drafts(15)
    assert made.drafts(2)


def test_drafts_that_pay_are_verified() -> None:
    made = schedule(lambda rows: 1.0 + 0.01 * rows)
    for _ in range(20):
        assert made.drafts(1)
        assert made.budget(np.array([[0.9, 0.8, 0.005]]), np.array([3]), 1, delayed=False) == 2


def test_drafts_nobody_knows_yet_teach_nothing() -> None:
    """A request that has just come counts as certain; a short draft says little of a whole one."""
    made = schedule(float)
    made.budget(np.ones((2, 3)), np.full(2, 3), 2, delayed=True)
    made.budget(np.full((2, 3), 0.1), np.array([1, 2]), 2, delayed=True)
    assert made.drafts(2)
    made.budget(np.full((2, 3), 0.1), np.array([3, 2]), 2, delayed=True)
    assert not made.drafts(2)


@pytest.mark.parametrize("requests", [1, 2, 3, 5, 8])
def test_the_gain_by_hand(requests: int) -> None:
    """Groups of as many requests as there are, each with its best number of drafts, against steps without."""
    rng = np.random.default_rng()
    seen = np.cumprod(rng.random((5, 3)), axis=1)
    seconds = np.concatenate([[0.0], np.cumsum(rng.random(8 * 5 * 4) + 0.1)])
    drafting = float(rng.random())
    groups = -(-len(seen) // requests)
    rows = [seen[i % len(seen)] for i in range(groups * requests)]
    tokens = spent = 0.0
    for group in range(groups):
        best = sorted(np.concatenate(rows[group * requests : (group + 1) * requests]), reverse=True)
        choices = [(requests + sum(best[:k]), seconds[requests + k]) for k in range(len(best) + 1)]
        chosen = max(choices, key=lambda choice: choice[0] / choice[1])
        tokens += chosen[0]
        spent += chosen[1] + drafting
    expected = (tokens / spent) / (requests / seconds[requests])
    assert gain(seen, requests, lambda rows: seconds[rows], drafting) == pytest.approx(expected)
