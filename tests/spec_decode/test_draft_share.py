"""Drafts are rows of requests that are there anyway: where a request costs more than a row, they are not priced as
requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from deepinfer_spec_decode.cost_table import CHEAPER, StepCosts, measure_draft_share
from deepinfer_spec_decode.schedule import ConfidenceSchedule
from deepinfer_spec_decode.settings import Settings
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_core.api import VerifyCost

SIZES = [1, 2, 4, 8, 16, 32, 64, 128]
FIRST = 10.0
Measure = Callable[..., float]


def device(request: float, row: float) -> Measure:
    """Milliseconds of a step."""
    return lambda rows, each=1: FIRST + request * -(-rows // each) + row * rows


def table(measure: Measure) -> list[tuple[int, float]]:
    return [(rows, measure(rows)) for rows in SIZES]


def told(requests: int, rows: int, seconds: float, chances: Any = None) -> VerifyCost:
    return VerifyCost(
        rows=rows,
        requests=requests,
        target_seconds=seconds,
        draft_seconds=0.0001 * (chances is not None),
        drafted=0 if chances is None else len(chances),
        decode=True,
        chances=chances,
    )


@pytest.mark.parametrize(("request_ms", "row_ms"), [(5.0, 1.0), (2.0, 1.0), (1.0, 0.0), (5.0, 0.1)])
def test_a_draft_costs_its_share(request_ms: float, row_ms: float) -> None:
    measure = device(request_ms, row_ms)
    share = measure_draft_share(measure, table(measure))
    assert share == pytest.approx(row_ms / (request_ms + row_ms))
    costs = StepCosts(table(measure), share)
    for requests, rows in ((1, 6), (16, 16), (16, 96), (60, 61)):
        expected = FIRST + request_ms * requests + row_ms * rows
        assert costs.verifying(requests, np.array([rows]))[0] == pytest.approx(expected)


def test_long_steps_are_not_repeated() -> None:
    """Steps of up to 0.1 s tell what drafts cost; where there are none, the smallest one."""
    for factor, most in ((0.001, 16), (1.0, 8)):
        asked: list[int] = []

        def measure(rows: int, each: int = 1, factor: float = factor, asked: list[int] = asked) -> float:
            asked.append(rows)
            return factor * device(4.0, 0.0)(rows, each)

        known = [(rows, factor * device(4.0, 0.0)(rows)) for rows in SIZES]
        assert measure_draft_share(measure, known) == pytest.approx(0.0)
        assert max(asked) == most


def test_what_a_measurement_does_not_tell_is_no_share() -> None:
    for measure in (device(0.0, 1.0), device(1.0, 0.0001 + CHEAPER / (1 - CHEAPER)), device(0.0, 0.0)):
        assert measure_draft_share(measure, table(measure)) == 1.0
    assert measure_draft_share(device(5.0, 1.0), [(1, 16.0), (4, 34.0)]) == 1.0, "too few rows to leave some together"

    def full(rows: int, each: int = 1) -> float:
        if each > 1:
            raise MemoryError
        return 6.0 * rows

    assert measure_draft_share(full, [(rows, 6.0 * rows) for rows in SIZES]) == 1.0


@given(
    steps=st.lists(st.floats(0.0, 9.0), min_size=len(SIZES), max_size=len(SIZES)),
    share=st.floats(0.0, 1.0),
    requests=st.integers(1, 100),
)
def test_the_price_never_falls_with_more_drafts(steps: list[float], share: float, requests: int) -> None:
    costs = StepCosts(list(zip(SIZES, np.cumsum(steps) + 1.0, strict=True)), share)
    rows = np.arange(requests, requests + 50)
    price, apart = costs.verifying(requests, rows), costs(rows)
    assert price[0] == pytest.approx(apart[0])
    assert (np.diff(price) >= -1e-9).all()
    assert (price <= apart + 1e-9).all()


@pytest.mark.parametrize("busy", [1.0, 2.0])
def test_steps_that_verify_correct_the_price_as_others_do(busy: float) -> None:
    measure = device(5.0, 1.0)
    costs = StepCosts(table(measure), measure_draft_share(measure, table(measure)))
    for step in range(400):
        requests = (2, 16, 20)[step % 3]
        rows = requests * (1, 6)[step % 2]
        costs.observe(told(requests, rows, busy * (FIRST + 5.0 * requests + rows)))
    assert costs.fits
    assert costs.verifying(16, np.array([96]))[0] == pytest.approx(busy * (FIRST + 80 + 96), rel=0.02)
    assert costs.verifying(16, np.array([16]))[0] == pytest.approx(busy * (FIRST + 80 + 16), rel=0.02)


@pytest.mark.parametrize(("request_ms", "row_ms", "drafts"), [(5.0, 1.0, True), (0.0, 6.0, False)])
def test_sixteen_requests_are_drafted_for_where_that_pays(request_ms: float, row_ms: float, drafts: bool) -> None:
    """Both devices take as long for requests without drafts. Where requests cost, verifying five drafts of each takes
    1.8 times as long for 3.4 times the tokens; where rows do, it takes 5.5 times as long."""

    def measure(rows: int, each: int = 1) -> float:
        return device(request_ms, row_ms)(rows, each) / 1000

    schedule = ConfidenceSchedule(Settings(cost_cache="off"))
    source = schedule.start(measure, SIZES, {})
    assert ("a draft costs 0.17 of a request's row" in source) == drafts
    survival = np.cumprod(np.full((16, 5), 0.8), axis=1)
    last = []
    for _ in range(60):
        count = schedule.drafts(16, 0)
        some = survival[:count]
        budget = schedule.budget(survival, np.full(16, 5), 16, delayed=True) if count == 16 else 0
        last.append(budget)
        rows = 16 + budget
        seconds = (FIRST + request_ms * 16 + row_ms * rows) / 1000
        schedule.observe(told(16, rows, seconds, some if count else None))
    assert (last[-1] == 80) == drafts
    assert (max(last) > 0) == drafts
