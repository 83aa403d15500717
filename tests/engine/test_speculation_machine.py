"""The engine machine with drafters: random arrivals, aborts and tiny pools, and drafts of any length and quality."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from test_engine_machine import BOTH, FULL, NEAR, EngineMachine, Shape
from toys.checkpoints import open_toy, write_toy
from toys.drafters import TOLD, Completion, ToyDrafter, check_drafter, drafter_of, drafting
from toys.load import Job, Load

from deepinfer_core import LLM

METHODS = ("varying", "excessive", "raising", "garbage", "outside")
SHAPES = [
    Shape(groups, num_blocks, budget, running, prefix_cache, ahead=False)
    for prefix_cache in (False, True)
    for groups, num_blocks, budget, running in (
        (FULL, 7, 5, 3),
        (FULL, 9, 3, 6),
        (FULL, 8, 64, 8),
        (NEAR, 6, 12, 3),
        (BOTH, 8, 17, 4),
    )
] + [Shape(FULL, 8, 24, 4, True, False, chunked=False)]
ENGINES: dict[tuple[Shape, str], LLM] = {}


def open_shape(shape: Shape, method: str, directory: Path) -> LLM:
    return open_toy(
        write_toy(directory, "PrefixHash", groups=dict(shape.groups), max_len=64),
        kv_cache__num_blocks=shape.num_blocks,
        kv_cache__prefix_cache=shape.prefix_cache,
        scheduling__max_batch_tokens=shape.budget,
        scheduling__max_running=shape.running,
        scheduling__chunked_prefill=shape.chunked,
        **drafting(method, right=3, every=3),
    )


@pytest.fixture(autouse=True, scope="module")
def _engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One engine a shape; the drafters take turns."""
    for shape, method in zip(SHAPES, METHODS * 3, strict=False):
        ENGINES[shape, method] = open_shape(shape, method, tmp_path_factory.mktemp("toy"))
    yield
    for llm in ENGINES.values():
        llm.close()
    ENGINES.clear()


def restart_drafter(llm: LLM, seed: int) -> ToyDrafter:
    """A drafter that has seen nothing, so that an example can be repeated."""
    speculator = llm.engine.core.speculator
    assert speculator is not None
    old = drafter_of(llm)
    speculator.drafter = type(old)(attrs.evolve(old.settings, seed=seed))
    speculator.proposed = speculator.accepted = speculator.failures = 0
    return drafter_of(llm)


class DraftingLoad(Load):
    """Tells the drafters the right answer of every job, and keeps the jobs."""

    def job(self, *, stream: bool = False) -> Job:
        job = super().job(stream=stream)
        request = job.request
        for child, expected in enumerate(job.expected):
            TOLD[request.request_id, child] = request.prompt_token_ids + expected
        return job


class SpeculationMachine(EngineMachine):
    @initialize(which=st.integers(0, len(SHAPES) - 1), seed=st.integers(0, 10**6))
    def begin(self, which: int, seed: int) -> None:
        (shape, _), self.llm = list(ENGINES.items())[which]
        for group in self.llm.engine.core.planner.cache.groups.values():
            group.pool.drop_cache()
        TOLD.clear()
        self.drafter = restart_drafter(self.llm, seed)
        self.load = DraftingLoad(self.llm, shape.windows, random.Random(seed))
        self.live: list[Job] = []
        self.done: list[Job] = []

    @rule()
    def cache_is_no_longer_than_the_tokens(self) -> None:
        """Between steps nothing of a rejected draft counts, and only committed blocks can be found."""
        table, block_size = self.llm.engine.core.planner.slots, 4
        for slot in table.running.tolist():
            assert table.computed[slot] < table.length[slot] == table.committed[slot] <= table.max_len[slot]
            assert table.published[slot] * block_size <= max(table.computed[slot], table.prompt_len[slot])

    def teardown(self) -> None:
        super().teardown()
        if not hasattr(self, "drafter"):
            return
        check_drafter(self.llm)
        expected: Counter[Completion] = Counter()
        preempted = 0
        for job in self.done:
            expected.update((job.request.request_id, child) for child in range(len(job.expected)))
            preempted += job.request.metrics.preemptions
        forgotten = Counter(self.drafter.forgotten)
        assert forgotten.keys() == expected.keys()
        assert forgotten.total() == expected.total() + preempted
        counted = [(job.request.metrics.proposed_drafts, job.request.metrics.accepted_drafts) for job in self.done]
        assert sum(proposed for proposed, _ in counted) == sum(v.proposed for v in self.drafter.heard)
        assert sum(accepted for _, accepted in counted) == sum(v.accepted for v in self.drafter.heard)


TestSpeculationMachine = SpeculationMachine.TestCase
TestSpeculationMachine.settings = settings(max_examples=50, stateful_step_count=20)
