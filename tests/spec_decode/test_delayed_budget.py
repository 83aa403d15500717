"""A schedule is told when the survival it sees is that of the very drafts it decides about."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from speculating import drafting, random_prompts
from toys.checkpoints import open_toy, write_toy

from deepinfer_core import SamplingParams

Array = np.ndarray[Any, Any]


def asked(directory: Path, ahead: bool, drains: bool, seeded: bool) -> list[tuple[bool, bool]]:
    """Of each step that verified drafts: ``delayed`` as it was told, and whether it saw their own survival."""
    settings = drafting(
        "told",
        depth=3,
        plugins__device_drafters__right=-1,
        plugins__device_drafters__certain=False,
        plugins__device_drafters__confidence="random",
        speculation__schedule="confidence",
        speculation__verify="rejection",
        scheduling__async_scheduling=ahead,
    )
    llm = open_toy(directory, **settings)
    core = llm.engine.core
    planning, running = core.planner.drafting, core.runner.drafting
    assert planning is not None
    assert running is not None
    schedule: Any = planning.schedule
    told: dict[int, tuple[Array, bool]] = {}
    own: dict[int, Array] = {}
    number = [0]
    allocate, resolve = running._allocate, running.resolve

    def budget(survival: Array, caps: Array, rows: int, *, delayed: bool) -> int:
        told[core.planner.steps] = survival.copy(), delayed
        return int(caps.sum())

    def resolved(plan: Any) -> Any:
        number[0] = plan.number
        return resolve(plan)

    def allocated(chances: Array, caps: Array, total: int) -> Any:
        own[number[0]] = chances * (np.arange(chances.shape[1]) < caps[:, None])
        return allocate(chances, caps, total)

    schedule.budget, schedule.drafts = budget, lambda requests, fresh: requests
    running._allocate, running.resolve = allocated, resolved  # type: ignore[method-assign]
    params = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True, seed=3 if seeded else None)
    prompts = random_prompts(random.Random(4), 4)
    requests = [llm.engine.intake.request(str(i), p, params, now=0.0, stream=False) for i, p in enumerate(prompts)]
    core.add(requests)
    while core.has_unfinished:
        core.step()
        if drains:
            core.drain()
    llm.close()
    return [(told[step][1], bool(np.array_equal(told[step][0], own[step]))) for step in sorted(told.keys() & own)]


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize(("ahead", "drains"), [(False, False), (True, False), (True, True)])
def test_own_survival_is_never_called_delayed(tmp_path: Path, ahead: bool, drains: bool, seeded: bool) -> None:
    directory = write_toy(tmp_path / "toy", "PrefixHash")
    found = asked(directory, ahead, drains, seeded)
    assert len(found) > 3
    assert all(delayed == (seeded or not own) for delayed, own in found)
    own_ones = sum(own for _, own in found)
    # One step ahead, too, a step may follow one that is committed: where the last of a few requests had no room.
    assert own_ones == len(found) if not ahead or drains else own_ones < len(found) / 2
