"""The whole engine under random arrivals, aborts and tiny pools: every request gets its closed-form answer.

The soak does the same for thousands of requests and then counts what is left.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from toys.checkpoints import open_toy, write_toy
from toys.checks import assert_clean
from toys.load import Job, Load

from deepinfer_core import LLM
from deepinfer_core.engine.request import Sequence

Windows = dict[str, int | None]


@attrs.frozen
class Shape:
    """One way to run an engine."""

    groups: tuple[tuple[str, int | None], ...]
    num_blocks: int
    budget: int
    running: int
    prefix_cache: bool
    ahead: bool
    chunked: bool = True
    block_size: int = 4

    def open(self, directory: Path) -> LLM:
        return open_toy(
            write_toy(directory, "PrefixHash", groups=dict(self.groups), max_len=64),
            kv_cache__num_blocks=self.num_blocks,
            kv_cache__block_size=self.block_size,
            kv_cache__prefix_cache=self.prefix_cache,
            scheduling__max_batch_tokens=self.budget,
            scheduling__max_running=self.running,
            scheduling__async_scheduling=self.ahead,
            scheduling__chunked_prefill=self.chunked,
        )

    @property
    def windows(self) -> list[int | None]:
        return [window for _, window in self.groups]


FULL = (("full", None),)
NEAR = (("near", 6),)
BOTH = (("full", None), ("near", 5))
SHAPES = [
    Shape(groups, num_blocks, budget, running, prefix_cache, ahead)
    for ahead in (False, True)
    for prefix_cache in (False, True)
    for groups, num_blocks, budget, running in (
        (FULL, 7, 5, 3),
        (FULL, 9, 3, 6),
        (FULL, 8, 64, 8),
        (NEAR, 6, 6, 3),
        (BOTH, 8, 7, 4),
        (FULL, 65, 2, 2),
    )
] + [
    Shape(FULL, 8, 24, 4, True, True, False),
    Shape(BOTH, 9, 20, 4, False, False, False),
    Shape(NEAR, 6, 24, 3, True, True, False),
    Shape(NEAR, 12, 5, 3, True, False, True, 1),
    Shape(BOTH, 31, 5, 3, True, True, True, 1),
    Shape(BOTH, 10, 8, 5, True, True, True, 3),
]
UNCHUNKED = SHAPES[-6]

ENGINES: dict[Shape, LLM] = {}


@pytest.fixture(autouse=True, scope="module")
def _engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One engine a shape for all examples: each of them must leave it clean."""
    ENGINES.update({shape: shape.open(tmp_path_factory.mktemp("toy")) for shape in SHAPES})
    yield
    for llm in ENGINES.values():
        llm.close()
    ENGINES.clear()


class EngineMachine(RuleBasedStateMachine):
    @initialize(shape=st.sampled_from(SHAPES), seed=st.integers(0, 10**6))
    def begin(self, shape: Shape, seed: int) -> None:
        self.llm = ENGINES[shape]
        for group in self.llm.engine.core.planner.cache.groups.values():
            group.pool.drop_cache()
        self.load = Load(self.llm, shape.windows, random.Random(seed))
        self.live: list[Job] = []
        self.done: list[Job] = []

    @rule(count=st.integers(1, 4), stream=st.booleans())
    def arrive(self, count: int, stream: bool) -> None:
        jobs = [self.load.job(stream=stream) for _ in range(count)]
        self.llm.engine.core.add([job.request for job in jobs])
        self.live += jobs

    @rule(steps=st.integers(1, 9))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.llm.engine.core.step()
        for job in self.live:
            job.fetch()
        self.collect()

    @precondition(lambda self: self.live or self.done)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from([*self.live, *self.done]))
        before = [s.finish_reason for s in job.request.sequences]
        job.aborted = True
        self.llm.engine.core.abort([job.request.request_id])
        after = [s.finish_reason for s in job.request.sequences]
        assert after == [reason or "abort" for reason in before]
        self.collect()

    @rule()
    def drain(self) -> None:
        self.llm.engine.core.drain()
        self.collect()

    def collect(self) -> None:
        ended = [job for job in self.live if job.request.finished]
        self.live = [job for job in self.live if not job.request.finished]
        for job in ended:
            job.check(self.llm)
        self.done += ended

    def teardown(self) -> None:
        if not hasattr(self, "llm"):
            return
        core = self.llm.engine.core
        limit = 200 + sum(60 * (len(j.request.prompt_token_ids) + 15) * len(j.expected) for j in self.live)
        try:
            while core.has_unfinished:
                core.step()
                limit -= 1
                assert limit > 0, "no progress"
            self.collect()
            assert not self.live
            for job in self.done:
                job.check(self.llm)
            assert_clean(self.llm)
        finally:
            core.abort(list(core.requests))
            core.drain()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=60, stateful_step_count=25)


# ---- soak


MOST_LIVE = 30
"""Requests that a soak has in the engine at once."""


def soak(llm: LLM, windows: list[int | None], requests: int, seed: int) -> None:
    """Arrivals while others run, one in ten aborted, a few refused; then everything is as it was."""
    rng = random.Random(seed)
    load, core = Load(llm, windows, rng), llm.engine.core
    live: list[Job] = []
    started = 0
    while started < requests or core.has_unfinished:
        if started < requests and len(live) <= MOST_LIVE - 7:
            jobs = [load.job(stream=rng.random() < 0.3) for _ in range(rng.randrange(1, 8))]
            core.add([job.request for job in jobs])
            live += jobs
            started += len(jobs)
        for _ in range(rng.randrange(1, 12)):
            core.step()
        if live and rng.random() < 0.4:
            job = rng.choice(live)
            job.aborted = True
            core.abort([job.request.request_id])
        for job in [job for job in live if job.request.finished]:
            job.check(llm)
            live.remove(job)
    assert not live
    assert_clean(llm)


def left_over() -> int:
    """Sequences that something still holds."""
    gc.collect()
    return sum(type(thing) is Sequence for thing in gc.get_objects())


@pytest.mark.parametrize(
    "shape", [SHAPES[1], SHAPES[10], SHAPES[16], UNCHUNKED], ids=["sync", "sync-both", "ahead", "unchunked"]
)
@pytest.mark.parametrize("requests", [500, pytest.param(5_000, marks=pytest.mark.slow)])
def test_soak(shape: Shape, requests: int) -> None:
    llm, seed = ENGINES[shape], random.randrange(10**6)
    print(f"seed {seed}")
    before = left_over()
    soak(llm, shape.windows, requests, seed)
    assert left_over() <= before
    core: Any = llm.engine.core
    assert len(core._expiry) <= 2 * MOST_LIVE + 16  # it is swept as soon as it is longer
    assert all(len(group.pool._by_hash) <= group.pool.num_usable for group in core.planner.cache.groups.values())
