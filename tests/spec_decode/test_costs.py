"""Cost tables: measured, corrected, kept on disk; and a schedule that stops drafting while it does not pay."""

from __future__ import annotations

import errno
import json
import random
from collections.abc import Callable
from pathlib import Path

import attrs
import numpy as np
import pytest
from deepinfer_spec_decode import cost_cache
from deepinfer_spec_decode.budget import gain
from deepinfer_spec_decode.cost_table import StepCosts, measure_table
from deepinfer_spec_decode.schedule import (
    ENOUGH,
    HOPELESS,
    LITTLE,
    MOST_HALVINGS,
    PROBE_SHARE,
    PROBED,
    REMEMBERED,
    YOUNG,
    ConfidenceSchedule,
)
from deepinfer_spec_decode.settings import Settings

from deepinfer_core.api import FRESH_TOKENS, VerifyCost


def cost(
    rows: int, seconds: float, draft: float = 0.0, drafted: int = 0, decode: bool = True, absorb: float = 0.0
) -> VerifyCost:
    return VerifyCost(
        rows=rows,
        requests=rows,
        target_seconds=seconds,
        draft_seconds=draft,
        drafted=drafted,
        decode=decode,
        absorb_seconds=absorb,
        chances=np.ones((drafted, 3)) if drafted else None,
    )


def at(costs: StepCosts, *rows: int) -> list[float]:
    return costs(np.array(rows)).tolist()


def test_between_and_beyond_what_was_measured() -> None:
    costs = StepCosts([(1, 1.0), (2, 1.5), (4, 1.4), (8, 3.5)])
    assert at(costs, 1, 2, 3, 4, 6, 8, 10) == pytest.approx([1.0, 1.4, 1.4, 1.4, 2.45, 3.5, 4.55])


def test_a_while_of_other_work_slows_no_size_more_than_others() -> None:
    """One undisturbed turn is enough; sizes measured one after the other would not be."""
    turns = 0

    def measure(rows: int, each: int = 1) -> float:
        nonlocal turns
        turns += 1
        return (1.0 + rows) * (5.0 if (turns // 9) % 2 else 1.0)

    assert measure_table(measure, [1, 2, 3, 4, 6, 8], 1e9) == [(r, 1.0 + r) for r in (1, 2, 3, 4, 6, 8)]


@pytest.mark.parametrize("seconds", [0.0, 20.0, 90.0, 150.0, 1e9])
def test_with_little_time_the_sizes_lie_all_over_the_range(seconds: float) -> None:
    """Steps of a launch-bound device: each expert reached costs 20 ms, whatever the rows, and 12 are reached soon."""
    now, sizes = [0.0], [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384]

    def true(rows: int) -> float:
        return 1.0 + 0.2 * min(2 * rows, 12) + 0.02 * rows

    def measure(rows: int, each: int = 1) -> float:
        now[0] += true(rows)
        return true(rows)

    table = measure_table(measure, sizes, seconds, lambda: now[0])
    measured = [rows for rows, _ in table]
    assert measured[:1] == [1]
    assert (measured == sizes) == (seconds == 1e9)
    assert now[0] <= max(seconds, 3 * (true(1) + true(4)))
    if seconds >= 90:
        assert measured[-1] >= 256
        assert len(measured) >= 6
        costs = StepCosts(table)
        for rows in (16, 26, 96, 300):
            assert at(costs, rows)[0] == pytest.approx(true(rows), rel=0.1)


@pytest.mark.parametrize(("compiling", "largest"), [(0.9, 64), (30.0, 4)])
def test_compiling_at_first_takes_nothing_from_the_time(compiling: float, largest: int) -> None:
    """On an H200 it left room for steps of 1 and 4 rows. If it takes too long altogether, that is all there is."""
    now, seen = [0.0], set[int]()

    def measure(rows: int, each: int = 1) -> float:
        now[0] += (0.05 + 0.001 * rows) + compiling * (rows not in seen)
        seen.add(rows)
        return 0.05 + 0.001 * rows

    table = measure_table(measure, [1, 2, 4, 8, 16, 32, 64], 4.0, lambda: now[0])
    assert table[-1][0] == largest


def test_small_sizes_have_all_their_turns_where_large_ones_take_the_time() -> None:
    """A host whose steps of 1,024 rows take half a second: steps that are disturbed once are not believed."""
    now, times = [0.0], dict[int, int]()

    def measure(rows: int, each: int = 1) -> float:
        times[rows] = times.get(rows, 0) + 1
        seconds = 0.005 + 0.0005 * rows
        now[0] += seconds
        return seconds * (3.0 if rows <= 16 and times[rows] in (2, 3) else 1.0)

    sizes = [1, 2, 4, 8, 16, 24, 32, 64, 128, 256, 512, 1024]
    table = dict(measure_table(measure, sizes, 4.0, lambda: now[0]))
    assert all(table[rows] == pytest.approx(0.005 + 0.0005 * rows) for rows in (1, 2, 4, 8, 16, 24))
    assert now[0] < 4.0 + 5 * 6 * 0.02


def test_sizes_beyond_the_memory_are_left_out() -> None:
    def measure(rows: int, each: int = 1) -> float:
        if rows > 20:
            raise MemoryError
        return float(rows)

    assert [r for r, _ in measure_table(measure, [1, 2, 8, 16, 24, 64], 1e9)] == [1, 2, 8, 16]


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
    rng = np.random.default_rng(random.getrandbits(63))
    for _ in range(300):
        rows = int(rng.choice([1, 3, 6, 20]))
        true = factor * float(costs.measured(np.array([rows]))[0]) + slope * rows
        costs.observe(cost(rows, true * rng.choice([0.99, 1.0, 1.01, 5.0], p=[0.25, 0.4, 0.25, 0.1])))
    for rows in (2, 40):
        true = factor * float(costs.measured(np.array([rows]))[0]) + slope * rows
        assert at(costs, rows) == pytest.approx([true], rel=0.03)


@pytest.mark.parametrize("sizes", [(16,), (15, 16), (14, 15, 16)])
def test_steps_of_nearly_one_size_leave_the_table_its_shape(sizes: tuple[int, ...]) -> None:
    """A busy while falls on one of the sizes: that is not what a row costs. What such steps took is what they cost."""
    table = [(1, 5.0), (16, 18.0), (64, 45.0)]
    for slow in sizes:
        costs = StepCosts(table)
        for step in range(2000):
            rows = sizes[step // 40 % len(sizes)]
            plain = float(costs.measured(np.array([rows]))[0])
            costs.observe(cost(rows, plain * (1.3 if rows == slow else 1.0)))
        assert costs._factor > 0.8
        assert 0.98 * 18.0 <= at(costs, 16)[0] <= 1.35 * 18.0
        assert at(costs, 64)[0] / at(costs, 16)[0] == pytest.approx(45.0 / 18.0, rel=0.15)


def test_a_slope_that_nothing_confirms_fades() -> None:
    """It was of long contexts; since then all steps are of one size, quick, and cost what they take."""
    costs = StepCosts([(1, 5.0), (16, 18.0), (64, 45.0)])
    for step in range(300):
        rows = (1, 16, 64)[step % 3]
        costs.observe(cost(rows, float(costs.measured(np.array([rows]))[0]) + 2.0 * rows))
    assert at(costs, 64)[0] == pytest.approx(45.0 + 128.0, rel=0.03)
    for _ in range(2000):
        costs.observe(cost(16, 12.0))
        if costs._steps[0][0] == 16 and len({step[0] for step in costs._steps}) == 1 and costs._since_fit == 0:
            assert at(costs, 16)[0] == pytest.approx(12.0, rel=0.01)
    assert at(costs, 1, 64) == pytest.approx([5.0 * 12 / 18, 45.0 * 12 / 18], rel=0.02)


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
    assert costs.drafting(3) == pytest.approx(0.2)


def test_drafting_for_other_numbers_scales_as_steps_of_so_many_rows() -> None:
    costs = StepCosts([(1, 1.0), (3, 2.0), (12, 4.0), (48, 12.0)])  # three drafts each
    for rows, seconds in ((4, 9.0), (4, 0.5), (1, 9.0), (1, 0.3)):
        costs.observe(cost(rows, 1.0, seconds, rows))
    assert costs.drafting(16) == pytest.approx(0.5 * 12 / 4)
    assert costs.drafting(4) == pytest.approx(0.5)
    assert costs.drafting(1) == pytest.approx(0.3)


def test_the_first_step_of_so_many_rows_does_not_count() -> None:
    """It builds what later ones find built: a quarter of a second each, and of 20 sizes none was seen twice."""
    costs = StepCosts([(1, 0.01), (64, 0.02)])
    for rows in range(1, 21):
        costs.observe(cost(rows, 0.25))
    assert at(costs, 1, 64) == [0.01, 0.02]
    for _ in range(20):
        costs.observe(cost(4, 0.02))
    assert costs.fits
    assert at(costs, 4)[0] > 0.015


def test_the_first_drafting_for_each_number_of_requests_does_not_count() -> None:
    """It builds what later ones find built: taken at its word, it would stop drafting for that number for good."""
    costs = StepCosts([(1, 1.0), (64, 64.0)])
    for requests in (1, 5, 9):
        costs.observe(cost(requests, float(requests), 100.0, requests))
        assert costs.drafting(requests) < 10
        costs.observe(cost(requests, float(requests), 0.5 * requests, requests))
        assert costs.drafting(requests) == pytest.approx(0.5 * requests)


def test_catching_up_and_prompts_are_not_the_cost_of_drafting() -> None:
    costs = StepCosts([(1, 1.0)])
    costs.observe(cost(2, 1.0, 5.0, 2))
    costs.observe(cost(2, 1.0))
    costs.observe(cost(2, 1.0, 7.5, 2, absorb=7.0))  # after a pause
    assert costs.drafting(2) == pytest.approx(0.5)
    costs.observe(cost(900, 80.0, 9.25, 2, decode=False, absorb=9.0))
    assert costs.drafting(2) == pytest.approx(0.25)
    costs.observe(cost(2, 1.0, 0.75, 2, absorb=0.125))
    assert costs.drafting(2) == pytest.approx(0.75)  # what is absorbed in each step belongs to it
    costs.observe(cost(900, 80.0, 9.25, 2, decode=False, absorb=9.0))
    assert costs.drafting(2) == pytest.approx(0.75)


def test_other_work_slows_drafting_and_target_alike() -> None:
    """The same ratio is found whether the machine was busy while drafting, while not, or all along."""
    for busy_at_first, busy_later in ((1.0, 1.0), (4.0, 1.0), (1.0, 4.0), (4.0, 4.0)):
        costs = StepCosts([(1, 1.0), (64, 8.0)])
        for step in range(400):
            busy = busy_at_first if step < 200 else busy_later
            drafting = step < 300
            costs.observe(cost(2, busy * at(StepCosts([(1, 1.0), (64, 8.0)]), 2)[0], busy * 0.5, 2 * drafting))
        plain = float(costs.measured(np.array([2]))[0])
        assert costs.drafting(2) / at(costs, 2)[0] == pytest.approx(0.5 / plain, rel=0.02)


KEY = {"model": "a", "device": "b"}


def test_the_cache_is_keyed_and_ages(tmp_path: Path) -> None:
    path = tmp_path / cost_cache.file_name(KEY, [1, 2])
    table = [(1, 0.5), (2, 0.75)]
    cost_cache.save(path, KEY, table, 0.25, clock=lambda: 100.0)
    assert cost_cache.load(path, 10, clock=lambda: 105.0) == (table, 0.25)
    assert cost_cache.load(path, 10, clock=lambda: 111.0) is None
    assert cost_cache.file_name({**KEY, "torch": "3"}, [1, 2]) != path.name
    assert cost_cache.file_name(KEY, [1, 2, 3]) != path.name
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"created": 1}',
        '{"created": 1, "table": [[1, 1]]}',
        '{"created": 1, "table": [[1, 1]], "draft_share": 2}',
        '{"created": 1, "table": [[2, 1], [1, 1]], "draft_share": 1}',
    ],
)
def test_a_broken_cache_file_is_measured_again(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    assert cost_cache.load(path, 1e18) is None


def test_the_schedule_measures_once(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.txt"
    foreign.write_text("mine")
    asked: list[int] = []

    def measure(rows: int, each: int = 1) -> float:
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
    assert json.loads(next(tmp_path.glob("step_costs_*")).read_text())["key"].items() >= KEY.items()


@pytest.mark.parametrize("step", ["mkdir", "fsync", "replace"])
def test_a_table_that_cannot_be_kept_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A file stands where the directory should be; the disk is full; the name cannot be taken."""
    directory = tmp_path / "cache"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if step == "mkdir":
        directory.write_text("mine")
    else:
        monkeypatch.setattr(cost_cache.os, step, full)
    made = ConfidenceSchedule(Settings(cost_cache=str(directory)))
    said = made.start(lambda rows, each=1: 0.001 * rows, [1, 2, 4], KEY)
    assert said.startswith("measured now, 3 step sizes up to 4 rows, and again at the next start: ")
    assert f"plugins.spec_decode.cost_cache {directory}: " in said
    assert at(made.costs, 4) == pytest.approx([0.004])
    assert directory.read_text() == "mine" if step == "mkdir" else not list(directory.iterdir())


def schedule(milliseconds: Callable[[int], float], probe_steps: int = 8) -> ConfidenceSchedule:
    made = ConfidenceSchedule(Settings(cost_cache="off", probe_steps=probe_steps))
    made.start(lambda rows, each=1: milliseconds(rows) / 1000, [1, 2, 4, 8, 16, 32, 64], KEY)
    return made


def run(
    made: ConfidenceSchedule, requests: int, chance: float, steps: int, drafting: float = 0.1, fresh: int = 0
) -> list[int]:
    """For how many requests each of the steps drafted. ``drafting``: milliseconds for one. ``fresh`` at first, until
    they have grown."""
    drafted = []
    for step in range(steps):
        drafted.append(made.drafts(requests, fresh if step < FRESH_TOKENS else 0))
        seconds = float(made.costs.measured(np.array([requests]))[0])
        told = cost(requests, seconds, drafted[-1] * drafting / 1000, drafted[-1])
        survival = np.cumprod(np.full((drafted[-1], 3), chance), axis=1)
        made.observe(attrs.evolve(told, chances=survival if drafted[-1] else None))
    return drafted


@pytest.mark.parametrize("requests", [1, 2, 4, 64])
def test_drafting_that_cannot_pay_stops(requests: int) -> None:
    """One more row costs as much as the first. Until enough is known a few requests are drafted for, then nobody but
    for single probes, of which no more than a few requests are drafted for."""
    drafted = run(schedule(float), requests, 0.5, 2000, drafting=0.3)
    few = min(requests, PROBED)
    first = -(-ENOUGH // few) if requests <= ENOUGH else 2
    assert drafted[: first + 7] == [few] * first + [0] * 7
    rest = drafted[first:]
    probes = [i for i, count in enumerate(rest) if count]
    assert probes
    assert {rest[i] for i in probes} == {few}
    assert min(np.diff(probes), default=8) >= 8


@pytest.mark.parametrize("requests", [1, 2, 4, 16, 64])
def test_what_may_pay_is_found_out_once(requests: int) -> None:
    """Drafting promises 0.87 times the tokens a second: that is believed after so many drafts, and one step's more."""
    drafted = run(schedule(float), requests, 0.9, 1000, drafting=0.15)
    assert LITTLE <= sum(drafted[:200]) <= LITTLE + requests + 2 * PROBED
    assert sum(drafted[200:]) <= 30 * PROBED


def test_a_start_that_is_clear_takes_two_probes() -> None:
    """Drafting takes half of a round: of the first drafting the time is not known, the second decides. Of few requests
    drafts are soon enough in any case."""
    assert run(schedule(float), 16, 0.9, 20, drafting=1.0) == [PROBED] * 2 + [0] * 18
    for requests in (PROBED, ENOUGH):
        first = run(schedule(float), requests, 0.9, 20, drafting=1.0)[: ENOUGH // PROBED]
        assert first == [PROBED] * (ENOUGH // PROBED)


def test_probes_in_vain_become_rarer_and_never_cease() -> None:
    drafted = run(schedule(float), 16, 0.5, 8000, drafting=0.3)
    probes = np.nonzero(drafted)[0][2:]
    gaps = np.diff(probes)
    assert gaps[-1] >= 2**MOST_HALVINGS * gaps[0] / 2
    assert (gaps[MOST_HALVINGS + 1 :] <= 1.1 * gaps[MOST_HALVINGS + 1]).all()
    assert len(gaps) > MOST_HALVINGS + 2


@pytest.mark.parametrize("drafting", [0.01, 1.0, 4.0])
def test_probes_take_a_bounded_share_of_the_time(drafting: float) -> None:
    """Whatever ``probe_steps`` says, and however often all requests are new."""
    made = schedule(float, probe_steps=1)
    spent = seconds = 0.0
    for _ in range(200):
        drafted = run(made, 4, 0.5, 20, drafting=drafting, fresh=4)
        spent += sum(drafted) * drafting
        seconds += 20 * 4.0
    assert spent <= PROBE_SHARE * seconds + 5 * PROBED * drafting


def test_beginning_in_error_counts_among_what_probes_take() -> None:
    """Every probe of two lucky requests begins drafting for 16, which stops with the first drafts of all: however often
    they say so, at most half a percent of the time goes there."""
    made = schedule(lambda rows: 4.0 + 0.5 * rows, probe_steps=1)
    lost, clock, began, extra = 0.0, 0.0, 0, 0
    for _ in range(60_000):
        drafted = made.drafts(16, 0)
        chance = 0.05 if drafted == 16 else 0.99
        survival = np.cumprod(np.full((drafted, 3), chance), axis=1)
        target, drafting = 4.0 + 0.5 * (16 + extra), 10.0 * (drafted == 16) + 1.0 * (0 < drafted < 16)
        told = cost(16 + extra, target / 1000, drafting / 1000, drafted)
        made.observe(attrs.evolve(told, requests=16, chances=survival if drafted else None))
        began += drafted == 16
        lost += drafting + 0.5 * extra
        clock += target + drafting
        extra = drafted
    assert began > 5
    assert lost < 1.3 * PROBE_SHARE * clock


def absorbing(made: ConfidenceSchedule, steps: int, fresh: int, paid: float) -> list[int]:
    """Steps of 16 requests and 16 ms that drafted, 1 ms each, where a probe also absorbs for ``paid`` ms."""
    probes = []
    for step in range(steps):
        drafted = made.drafts(16, fresh if step < FRESH_TOKENS else 0)
        told = cost(16, 0.016, 0.001 * drafted + 0.001 * paid * bool(drafted), drafted)
        chances = np.full((drafted, 3), 0.1) if drafted else None
        made.observe(attrs.evolve(told, absorb_seconds=0.001 * paid * bool(drafted), chances=chances))
        probes += [step] if drafted else []
    return probes


def test_what_a_probe_absorbs_counts_too() -> None:
    """Judged by the seconds the last one took: 10 ms of absorbing beside 2 ms of drafting."""
    made = schedule(float, probe_steps=1)
    probes = absorbing(made, 30_000, 0, 10.0)[-(-ENOUGH // PROBED) :]
    assert len(probes) >= 3
    assert min(np.diff(probes)) * 16.0 >= 12.0 / PROBE_SHARE


def test_new_requests_that_cannot_pay_are_no_reason_to_probe() -> None:
    """All drafts so far say so by a clear margin: probes are as rare as within one text, and never cease."""
    made = schedule(float, probe_steps=1)
    absorbing(made, 100, 0, 0.0)
    assert made._promise(16) < HOPELESS
    clock, probes = 0, []
    for _ in range(2000):
        probes += [clock + step for step in absorbing(made, 20, 16, 0.0)]
        clock += 20
    gaps = np.diff(probes)
    assert len(gaps) > MOST_HALVINGS
    assert gaps[-1] * 16.0 >= 2**MOST_HALVINGS * 2.0 / PROBE_SHARE


def test_what_pays_again_is_found_by_probes() -> None:
    made = schedule(lambda rows: 1 + 0.2 * rows)
    assert run(made, 1, 0.1, 200)[-8:].count(1) <= 1
    assert run(made, 1, 0.99, 300)[-REMEMBERED:] == [1] * REMEMBERED


def test_new_requests_are_not_judged_by_the_text_before() -> None:
    """Every other request pays. After one that does not, the next is found out once it has grown."""
    made = schedule(lambda rows: 1 + 0.2 * rows)
    for text in range(6):
        pays = text % 2 == 1
        drafted = run(made, 1, 0.97 if pays else 0.05, 120, drafting=0.15, fresh=1)
        if text >= 1:
            assert 1 in drafted[: FRESH_TOKENS + 1]
            assert sum(drafted[20:]) == (100 if pays else pytest.approx(0, abs=YOUNG))


def batch(made: ConfidenceSchedule, requests: int, *chances: float) -> list[int]:
    """For how many of so many new requests each step drafted. Drafts are accepted with the first chance at the
    beginning of a text, with the others in the parts of 16 tokens that follow, with the last up to 96 tokens. Drafting
    takes 2 ms for one."""
    drafted: list[int] = []
    tokens = 0.0
    while tokens < 96:
        drafted.append(made.drafts(requests, requests if tokens < FRESH_TOKENS else 0))
        verifies = drafted[-1] == requests
        part = 0 if tokens < FRESH_TOKENS else 1 + int(tokens - FRESH_TOKENS) // 16
        survival = np.cumprod(np.full((drafted[-1], 3), chances[min(part, len(chances) - 1)]), axis=1)
        rows = 4 * requests if verifies else requests
        told = cost(rows, float(made.costs.measured(np.array([rows]))[0]), 0.002 * drafted[-1], drafted[-1])
        made.observe(attrs.evolve(told, requests=requests, chances=survival if drafted[-1] else None))
        tokens += 1 + (survival[0].sum() if verifies else 0)
    return drafted


def test_what_pays_late_in_a_text_is_found_and_remembered() -> None:
    """Its second part loses as well, though less than a fifth: few drafts more, and what follows is known to pay."""
    made = schedule(lambda rows: 8.8 + 0.48 * (rows - 4))
    batch(made, 4, 0.4, 0.6, 0.97)
    for _ in range(10):
        drafted = batch(made, 4, 0.4, 0.6, 0.97)
        assert drafted[FRESH_TOKENS + 1 :] == [4] * len(drafted[FRESH_TOKENS + 1 :])


@pytest.mark.parametrize("row", [0.4, 0.48, 0.6])
def test_what_begins_badly_is_found_to_pay_later(row: float) -> None:
    """Of new requests, when they have grown; of the next ones without finding out again."""
    made = schedule(lambda rows: 8.8 + row * (rows - 4))
    batch(made, 4, 0.4, 0.95)
    for _ in range(10):
        drafted = batch(made, 4, 0.4, 0.95)
        assert drafted[: FRESH_TOKENS + 1].count(4) <= 3
        assert drafted[FRESH_TOKENS + 1 :] == [4] * len(drafted[FRESH_TOKENS + 1 :])


def test_what_never_pays_is_not_found_out_again_and_again() -> None:
    made = schedule(lambda rows: 8.8 + 0.48 * (rows - 4))
    first = batch(made, 4, 0.4, 0.4)
    assert sum(first) <= 3 * ENOUGH
    later = [sum(batch(made, 4, 0.4, 0.4)) for _ in range(20)]
    assert np.mean(later) <= PROBED


@pytest.mark.parametrize("requests", [1, 4, 8])
def test_a_text_that_begins_a_little_worse_is_drafted_on(requests: int) -> None:
    """Its drafts lose 4 %, and what follows gains: drafting goes on, in an engine that knows nothing as in one that
    knows other texts. If nothing better follows it ends; if they lose more, sooner."""

    def made() -> ConfidenceSchedule:
        return schedule(lambda rows: 1 + 0.2 * rows / requests)

    def young(one: ConfidenceSchedule, chance: float, drafting: float = 0.1) -> list[int]:
        return run(one, requests, chance, 14, drafting=drafting / requests, fresh=requests)

    def older(one: ConfidenceSchedule, chance: float, steps: int = 40) -> list[int]:
        return run(one, requests, chance, steps, drafting=0.1 / requests)

    one = made()
    for _ in range(3):
        assert young(one, 0.2)[-1] == requests
        assert older(one, 0.97) == [requests] * 40
    young(one, 0.2)
    assert older(one, 0.2)[20:].count(requests) <= (20 if requests <= PROBED else 0)
    one = made()
    older(one, 0.97, 60)
    young(one, 0.01, drafting=0.3)
    assert older(one, 0.01)[YOUNG:].count(requests) <= (3 if requests <= PROBED else 0)


def test_fewer_requests_are_another_question() -> None:
    """Steps of up to 8 rows cost the same: 16 requests do not pay, 2 do, with what is known already."""
    made = schedule(lambda rows: float(max(rows, 8)), probe_steps=1000)
    first = [PROBED] * 2
    assert run(made, 16, 0.5, 20, drafting=0.5) == first + [0] * (20 - len(first))
    assert not made.drafts(15, 0)
    assert made.drafts(2, 0) == 2


def test_drafts_that_pay_are_verified() -> None:
    made = schedule(lambda rows: 1.0 + 0.01 * rows)
    for _ in range(20):
        assert made.drafts(1, 0)
        assert made.budget(np.array([[0.9, 0.8, 0.005]]), np.array([3]), 1, delayed=False) == 2


@pytest.mark.parametrize("drafting", [0.0, 1.0, 3.0, 7.0])
def test_a_round_costs_its_drafting_too(drafting: float) -> None:
    """While each step drafts, rows are cheap beside what a round costs anyway: the budget against brute force."""
    made = schedule(lambda rows: 4.0 + 0.5 * rows)
    run(made, 1, 0.99, 30, drafting=drafting)
    survival = np.cumprod([[0.9, 0.6, 0.5]], axis=1)
    assert made.drafts(1, 0)
    spent = made.costs.drafting(1) * 1000
    assert spent == pytest.approx(drafting)
    rates = [(1 + survival[0, :k].sum()) / (4.0 + 0.5 * (1 + k) + spent) for k in range(4)]
    assert made.budget(survival, np.array([3]), 1, delayed=True) == int(np.argmax(rates))


def test_a_probe_is_judged_by_what_verifying_costs() -> None:
    """Its drafting is spent and will not be repeated."""
    made = schedule(lambda rows: float(rows))
    run(made, 1, 0.3, 30, drafting=5.0)
    assert not made.drafts(1, 0)
    assert made.budget(np.array([[0.9, 0.8, 0.7]]), np.array([3]), 1, delayed=True) == 0


@pytest.mark.parametrize("requests", [1, 2, 3, 5, 8])
def test_the_gain_by_hand(requests: int) -> None:
    """Groups of as many requests as there are, each with its best number of drafts, against steps without."""
    rng = np.random.default_rng(random.getrandbits(63))
    seen = np.cumprod(rng.random((5, 3)), axis=1)
    seconds = np.concatenate([[0.0], np.cumsum(rng.random(8 * 5 * 4) + 0.1)])
    drafting = float(rng.random())
    groups = -(-len(seen) // requests)
    rows = [seen[i % len(seen)] for i in range(groups * requests)]
    tokens = spent = 0.0
    for group in range(groups):
        best = sorted(np.concatenate(rows[group * requests : (group + 1) * requests]), reverse=True)
        choices = [(requests + sum(best[:k]), seconds[requests + k]) for k in range(len(best) + 1)]
        chosen = max(choices, key=lambda choice: choice[0] / (choice[1] + drafting))
        tokens += chosen[0]
        spent += chosen[1] + drafting
    expected = (tokens / spent) / (requests / seconds[requests])
    assert gain(seen, requests, lambda rows: seconds[rows], drafting) == pytest.approx(expected)
