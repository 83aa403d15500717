"""Runs a load through one simulated engine, or through several behind a router."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import attrs

from deepinfer_core.api import Policy
from deepinfer_core.api.simulation import (
    CostModel,
    SimulatedRequest,
    SimulatedResult,
    Simulation,
    SimulationConfig,
    SimulationTotals,
    open_simulation,
)

Router = Literal["least_loaded", "round_robin"]
ROUTERS: tuple[Router, ...] = ("least_loaded", "round_robin")


def run(
    policies: Iterable[Policy],
    config: SimulationConfig,
    cost: CostModel,
    requests: Iterable[SimulatedRequest],
    on_result: Callable[[SimulatedResult], None],
    router: Router = "least_loaded",
) -> SimulationTotals:
    """Simulate; the totals of all engines together.

    Args:
        policies: one instance for each engine.
        router: which engine gets a request: the one with the fewest tokens outstanding, or each in turn.
    """
    engines = [open_simulation(policy, config, cost, on_result) for policy in policies]
    for number, request in enumerate(requests):
        for engine in engines:
            engine.run_until(request.arrival)
        _choose(engines, router, number).add(request)
    for engine in engines:
        engine.run_until(float("inf"))
    return _sum([engine.totals() for engine in engines])


def _choose(engines: list[Simulation], router: Router, number: int) -> Simulation:
    if router == "round_robin":
        return engines[number % len(engines)]
    return min(engines, key=lambda engine: engine.outstanding)


def _sum(totals: list[SimulationTotals]) -> SimulationTotals:
    columns = zip(*(attrs.astuple(t) for t in totals), strict=True)
    return SimulationTotals(*(sum(column) for column in columns))
