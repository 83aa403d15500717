"""Advancing stretches of decode at once is the same as planning every step."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_core.api import Policy
from deepinfer_core.api.simulation import (
    SimulatedRequest,
    SimulatedResult,
    SimulationConfig,
    StepShape,
    open_simulation,
    run_simulation,
)
from deepinfer_core.engine.fcfs import FirstComeFirstServed


class Affine:
    """Seconds that differ with every number of a shape."""

    def seconds(self, shape: StepShape) -> float:
        rows = 3e-3 + 1.7e-5 * shape.tokens + 0.9e-5 * shape.sampled
        return rows + 1.1e-8 * shape.prefill_context + 1.3e-8 * shape.decode_context

    def decode_seconds(self, rows: int, context: int, steps: int) -> np.ndarray[Any, Any]:
        shapes = (StepShape(0, rows, rows, 0, context + k * rows) for k in range(steps))
        return np.array([self.seconds(shape) for shape in shapes])


Step = tuple[StepShape, float, float]


def simulate(
    policy: Policy, config: SimulationConfig, requests: list[SimulatedRequest], *, stepwise: bool
) -> tuple[list[Step], list[SimulatedResult], Any]:
    steps: list[Step] = []
    results: list[SimulatedResult] = []
    simulation: Any = open_simulation(
        policy, config, Affine(), results.append, watch=lambda *step: steps.append(step), stepwise=stepwise
    )
    run_simulation(simulation, requests)
    return steps, results, simulation


@st.composite
def loads(draw: st.DrawFn) -> list[SimulatedRequest]:
    requests, now = [], 0.0
    for number in range(draw(st.integers(1, 25))):
        now += draw(st.sampled_from([0.0, 0.001, 0.05, 0.3, 2.0]))
        prompt, shared = draw(st.integers(1, 60)), draw(st.integers(0, 15))
        requests.append(
            SimulatedRequest(
                id=str(number),
                arrival=now,
                prompt=prompt,
                outputs=tuple(draw(st.lists(st.integers(1, 80), min_size=1, max_size=2))),
                blocks=tuple(range(shared)),
                tenant=draw(st.sampled_from(["a", "b"])),
            )
        )
    return requests


@given(
    requests=loads(),
    blocks=st.integers(40, 120),
    budget=st.integers(2, 64),
    running=st.integers(2, 8),
    cached=st.booleans(),
)
@settings(max_examples=60)
def test_equal_to_stepwise(
    requests: list[SimulatedRequest], blocks: int, budget: int, running: int, cached: bool
) -> None:
    config = SimulationConfig(
        block_size=4, num_blocks=blocks, max_batch_tokens=budget, max_running=running, prefix_cache=cached
    )
    one, all_at_once = (simulate(FirstComeFirstServed(), config, requests, stepwise=s) for s in (True, False))
    assert all_at_once[0] == one[0]
    assert [attrs.astuple(r) for r in all_at_once[1]] == [attrs.astuple(r) for r in one[1]]
    pools = [run[2].planner.cache.groups["full"].pool for run in (one, all_at_once)]
    assert pools[0]._hash == pools[1]._hash
    assert list(pools[0]._idle) == list(pools[1]._idle)
    assert pools[0].evictions == pools[1].evictions
    totals = [run[2].totals() for run in (one, all_at_once)]
    assert totals[0].busy == pytest.approx(totals[1].busy)
    assert attrs.evolve(totals[0], busy=0) == attrs.evolve(totals[1], busy=0)
    costs = [run[2].planner.step_cost.table().tolist() for run in (one, all_at_once)]
    assert costs[0] == costs[1]


def test_most_steps_are_not_planned() -> None:
    requests = [SimulatedRequest(id=str(i), arrival=i * 0.4, prompt=100, outputs=(200,)) for i in range(20)]
    config = SimulationConfig()
    _, results, simulation = simulate(FirstComeFirstServed(), config, requests, stepwise=False)
    asked: list[int] = []
    plan = simulation.planner.plan
    assert len(results) == 20
    assert simulation.totals().output_tokens == 20 * 200
    again: Any = open_simulation(FirstComeFirstServed(), config, Affine(), lambda result: None)
    again.planner.plan = lambda: asked.append(1) or type(again.planner).plan(again.planner)
    run_simulation(again, requests)
    assert plan is not None
    assert len(asked) < simulation.totals().steps / 10
