"""The engine machine with a drafter on the device: drafts that only the step before knows, one step ahead or not.

Random arrivals, several completions, aborts while drafts are in flight, tiny pools, windows, any schedule.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from test_engine_machine import BOTH, FULL, NEAR, EngineMachine, Shape
from toys.checkpoints import open_toy, write_toy
from toys.device_drafters import TEXTS
from toys.load import Job, Load

from deepinfer_core import LLM

SHAPES = [
    Shape(groups, num_blocks, budget, running, prefix_cache, ahead)
    for ahead in (False, True)
    for prefix_cache in (False, True)
    for groups, num_blocks, budget, running in (
        (FULL, 7, 5, 3),
        (FULL, 9, 12, 6),
        (NEAR, 6, 12, 3),
        (BOTH, 9, 17, 4),
    )
] + [Shape(FULL, 8, 24, 4, True, True, chunked=False)]
ENGINES: dict[Shape, LLM] = {}


def open_shape(shape: Shape, directory: Path) -> LLM:
    return open_toy(
        write_toy(directory, "PrefixHash", groups=dict(shape.groups), max_len=64),
        kv_cache__num_blocks=shape.num_blocks,
        kv_cache__prefix_cache=shape.prefix_cache,
        scheduling__max_batch_tokens=shape.budget,
        scheduling__max_running=shape.running,
        scheduling__chunked_prefill=shape.chunked,
        scheduling__async_scheduling=shape.ahead,
        speculation__method="told",
        speculation__max_draft_tokens=4,
        plugins__paths=["toys.plugin", "toys.device_drafters"],
        plugins__device_drafters__right=-1,
    )


@pytest.fixture(autouse=True, scope="module")
def _engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    ENGINES.update({shape: open_shape(shape, tmp_path_factory.mktemp("toy")) for shape in SHAPES})
    yield
    for llm in ENGINES.values():
        llm.close()
    ENGINES.clear()


class ToldLoad(Load):
    """The drafter knows the right answer of every job, and gives some of it."""

    def job(self, *, stream: bool = False) -> Job:
        job = super().job(stream=stream)
        TEXTS.extend(job.request.prompt_token_ids + expected for expected in job.expected)
        return job


class LateDraftsMachine(EngineMachine):
    @initialize(shape=st.sampled_from(SHAPES), seed=st.integers(0, 10**6))
    def begin(self, shape: Shape, seed: int) -> None:
        self.llm = ENGINES[shape]
        speculator = self.llm.engine.core.speculator
        assert speculator is not None
        drafter = speculator.drafter
        for group in self.llm.engine.core.planner.cache.groups.values():
            group.pool.drop_cache()
        TEXTS.clear()
        drafter.random.seed(seed)  # type: ignore[attr-defined]
        speculator.proposed = speculator.accepted = 0
        self.load = ToldLoad(self.llm, shape.windows, random.Random(seed))
        self.live: list[Job] = []
        self.done: list[Job] = []

    def teardown(self) -> None:
        super().teardown()
        if not hasattr(self, "load"):
            return
        speculator = self.llm.engine.core.speculator
        assert speculator is not None
        assert speculator.failures == 0
        metrics = [job.request.metrics for job in self.done]
        assert sum(m.proposed_drafts for m in metrics) == speculator.proposed
        assert sum(m.accepted_drafts for m in metrics) == speculator.accepted


TestLateDraftsMachine = LateDraftsMachine.TestCase
TestLateDraftsMachine.settings = settings(max_examples=50, stateful_step_count=20)


def test_drafts_were_accepted_and_ran_ahead() -> None:
    """The machine is about something: in the same process, drafts of a told engine are used, on either loop."""
    for shape in (SHAPES[0], SHAPES[8]):
        llm = ENGINES[shape]
        load = ToldLoad(llm, shape.windows, random.Random(3))
        speculator = llm.engine.core.speculator
        assert speculator is not None
        before = speculator.accepted
        jobs = [load.job() for _ in range(30)]
        for job in jobs:
            llm.engine.core.add([job.request])
            while llm.engine.core.has_unfinished:
                llm.engine.core.step()
            job.check(llm)
        assert speculator.accepted > before
        assert (llm.engine.core.ahead == 1) is shape.ahead
        TEXTS.clear()
