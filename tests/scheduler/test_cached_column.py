"""What a policy is told of the prefix cache is what the cache holds, once a step or two have gone by."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from test_stretch import Affine

from deepinfer_core.api.simulation import SimulatedRequest, SimulationConfig
from deepinfer_core.engine.cached_prefixes import LOOKUPS
from deepinfer_core.engine.fcfs import FirstComeFirstServed
from deepinfer_core.engine.simulated import SimulatedEngine


def asked(number: int, prompt: int, shared: int, output: int) -> SimulatedRequest:
    own = range(1000 * (number + 1), 1000 * (number + 1) + prompt)
    return SimulatedRequest(
        id=str(number), arrival=0.0, prompt=prompt, outputs=(output,), blocks=(*range(shared), *own)[: prompt // 4]
    )


def engine(blocks: int = 2000) -> Any:
    config = SimulationConfig(block_size=4, num_blocks=blocks, max_batch_tokens=16, max_running=2)
    return SimulatedEngine(FirstComeFirstServed(), config, Affine(), lambda result: None, stepwise=True)


def cached(simulated: Any) -> list[int]:
    return simulated.planner.waiting.columns()["cached"].tolist()  # type: ignore[no-any-return]


def truth(simulated: Any) -> list[int]:
    return [simulated.planner.lookup(sequence).tokens for sequence in simulated.planner.waiting]


@given(
    loads=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 12), st.integers(1, 9)), min_size=3, max_size=30),
    steps=st.integers(1, 60),
)
@settings(max_examples=60)
def test_it_catches_up_where_nothing_is_evicted(loads: list[tuple[int, int, int]], steps: int) -> None:
    simulated = engine()
    for number, load in enumerate(loads):
        simulated.add(asked(number, *load))
    for _ in range(steps):
        if simulated.unfinished:
            simulated.step()
        known = np.array(cached(simulated))
        assert (known <= truth(simulated)).all()
    while simulated.planner.prefixes.due:
        simulated.planner.prefixes.refresh()
    assert cached(simulated) == truth(simulated)


def test_a_step_looks_up_a_few_only() -> None:
    simulated = engine()
    for number in range(40):
        simulated.add(asked(number, 40, 10, 30))
    looked: list[int] = []
    lookup = simulated.planner.cache.lookup

    def counting(*arguments: Any) -> Any:
        looked.append(1)
        return lookup(*arguments)

    simulated.planner.cache.lookup = counting
    for _ in range(12):
        before = len(looked)
        simulated.step()
        assert len(looked) - before <= LOOKUPS + 3  # and those that are about to be admitted
    assert cached(simulated) == truth(simulated) == [39] * 37 or max(cached(simulated)) == 39


def test_nothing_is_kept_of_those_that_left() -> None:
    simulated = engine(blocks=60)
    for number in range(30):
        simulated.add(asked(number, 50, 5, 9))
    simulated.run_until(float("inf"))
    prefixes = simulated.planner.prefixes
    assert not prefixes._lacking
    assert not prefixes._filed


def test_what_was_evicted_shows_when_it_is_about_to_be_admitted() -> None:
    """The second request grows into the blocks of the first one's prompt, which the third had been promised."""
    simulated = engine(blocks=16)
    simulated.add(asked(0, 40, 10, 1))
    simulated.run_until(float("inf"))
    simulated.add(asked(1, 40, 0, 18))
    simulated.step()
    simulated.add(asked(2, 44, 10, 5))
    assert cached(simulated) == [40]
    fell = False
    while len(simulated.planner.waiting):
        before = cached(simulated)[0]
        simulated.step()
        for known, held in zip(cached(simulated), truth(simulated), strict=True):
            if simulated.slots.committed.max() > 42:  # while prompts take whole steps, nobody is about to be admitted
                assert known <= held
            fell |= known < before
    assert fell
