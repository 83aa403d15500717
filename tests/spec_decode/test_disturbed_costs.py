"""Corrections of a cost table beside other work, which slows the few steps of one size and hardly any of another."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np
import pytest
from deepinfer_spec_decode.cost_table import StepCosts

from deepinfer_core.api import VerifyCost

TABLES = {
    "flat": [(1, 0.005), (16, 0.0052), (64, 0.006)],
    "launches": [(1, 0.005), (16, 0.006), (64, 0.009)],
    "rows": [(1, 0.005), (16, 0.018), (64, 0.045)],
}
MEASURED_EACH = 4
"""Steps without drafts of which one is measured, as by the engine."""


class Machine:
    """Runs steps by a clock of its own; what it takes for one is the table's, times ``slower(seconds since start)``."""

    def __init__(self, table: list[tuple[int, float]]) -> None:
        self.costs = StepCosts(table)
        self.now = 0.0
        self.slower: Callable[[float], float] = lambda now: 1.0

    def true(self, rows: int) -> float:
        return float(self.costs.measured(np.array([rows]))[0])

    def run(self, rows: int, stands_for: int = 1) -> None:
        seconds = self.true(rows) * self.slower(self.now)
        self.now += stands_for * seconds
        told = VerifyCost(rows=rows, requests=rows, target_seconds=seconds, draft_seconds=0.0, drafted=0, decode=True)
        self.costs.observe(attrs.evolve(told, steps=stands_for))

    def off(self, rows: int) -> float:
        """What it is said to cost by what it costs undisturbed."""
        return float(self.costs(np.array([rows]))[0]) / self.true(rows)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(("requests", "probe"), [(1, 6), (2, 12), (4, 14), (16, 26)])
@pytest.mark.parametrize("before", [4, 40, 400])
def test_two_disturbed_probes_are_not_what_rows_cost(table: str, requests: int, probe: int, before: int) -> None:
    """They are the only steps of their size: nothing contradicts them, and while drafting is stopped nothing will."""
    machine = Machine(TABLES[table])
    for _ in range(before):
        machine.run(requests, MEASURED_EACH)
    began = machine.now
    machine.slower = lambda now: 5.0 if now < began + 5 * 2 * machine.true(probe) else 1.0
    machine.run(probe)
    machine.run(probe)
    worst = 0.0
    for _ in range(600):
        machine.run(requests, MEASURED_EACH)
        assert machine.off(requests) == pytest.approx(1.0, abs=0.02)
        worst = max(worst, machine.off(probe))
    assert worst <= 1.25
    for _ in range(3):  # the next that are not disturbed are more
        machine.run(probe)
        for _ in range(8):
            machine.run(requests, MEASURED_EACH)
    assert machine.off(probe) == pytest.approx(1.0, abs=0.05)
    assert machine.off(64) == pytest.approx(1.0, abs=0.25)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("factor", [0.4, 3.0])
def test_what_all_steps_take_is_followed(table: str, factor: float) -> None:
    """As soon as most of those that are kept say so."""
    machine = Machine(TABLES[table])
    for step in range(300):
        machine.run((16, 26)[step % 2])
    machine.slower = lambda now: factor
    for step in range(160):
        machine.run((16, 26)[step % 2])
    for rows in (16, 26, 64):
        assert machine.off(rows) == pytest.approx(factor, rel=0.05)


@pytest.mark.parametrize("table", TABLES)
def test_steps_at_the_start_are_followed_at_once(table: str) -> None:
    machine = Machine(TABLES[table])
    machine.slower = lambda now: 2.5
    for step in range(24 * 3):
        machine.run((16, 26)[step % 2])
    for rows in (16, 26, 64):
        assert machine.off(rows) == pytest.approx(2.5, rel=0.05)
