"""Cost tables of an engine: what one on disk holds for, and how far they go where memory runs out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from deepinfer_spec_decode.cost_cache import file_name
from deepinfer_spec_decode.cost_table import StepCosts
from deepinfer_spec_decode.schedule import ConfidenceSchedule
from deepinfer_spec_decode.settings import Settings
from speculating import drafting
from toys.checkpoints import open_toy, write_toy
from toys.models import Toy
from toys.oracle import count_tokens

from deepinfer_core import SamplingParams
from deepinfer_core.checkpoint import open_checkpoint
from deepinfer_core.engine.speculation_start import StepProbe, cost_key

FULL = "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes."


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    directory = write_toy(tmp_path_factory.mktemp("toy"), "Count")
    llm = open_toy(directory, **drafting("told"))
    llm.close()
    return llm.engine.planned, directory


def key(planned: Any, directory: Path, **changes: Any) -> dict[str, str]:
    with open_checkpoint(str(directory)) as checkpoint:
        return cost_key(attrs.evolve(planned, plan=attrs.evolve(planned.plan, **changes)), checkpoint)


def test_everything_that_changes_costs_is_in_the_key(planned: tuple[Any, Path], tmp_path: Path) -> None:
    engine, directory = planned
    first, plan = key(engine, directory), engine.plan
    assert key(engine, directory) == first
    other_machine = {**plan.device, "evidence": "/dev/acme0, Acme 2, driver 3.1"}
    other_plugin = (attrs.evolve(plan.plugins[0], version="9.9"), *plan.plugins[1:])
    other_operator = (attrs.evolve(plan.choices[0], provider="acme:fast"), *plan.choices[1:])
    found = [
        key(engine, directory, device=other_machine),
        key(engine, directory, device={**plan.device, "arch": "sm_999"}),
        key(engine, directory, core="9.9"),
        key(engine, directory, plugins=other_plugin),
        key(engine, directory, choices=other_operator),
        key(engine, write_toy(tmp_path / "other", "Count")),
    ]
    assert len({tuple(sorted(each.items())) for each in [first, *found]}) == 1 + len(found)
    assert plan.device["evidence"] in first["device"]


def test_a_file_is_named_after_all_of_its_key() -> None:
    key, rows = {"model": "a", "device": "b"}, [1, 2]
    name = file_name(key, rows)
    assert file_name({"device": "b", "model": "a"}, rows) == name
    others = [({"model": "a", "device": "c"}, rows), ({"model": "a", "core": "b"}, rows), (key, [1, 3])]
    assert len({name, *(file_name(*other) for other in others)}) == 4


def test_what_is_delayed_is_searched_as_a_whole() -> None:
    """Two drafts do not pay, three do: seen only by a search that does not stop at the first."""
    schedule = ConfidenceSchedule(Settings(cost_cache="off"))
    schedule.costs = StepCosts([(1, 1.0), (2, 2.0), (4, 2.0)])
    survival, caps = np.array([[0.9, 0.9, 0.9]]), np.array([3])
    assert schedule.budget(survival, caps, 1, delayed=True) == 3
    assert schedule.budget(survival, caps, 1, delayed=False) == 0


@pytest.mark.parametrize("most", [0, 3])
def test_costs_are_measured_as_far_as_the_memory_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """A drafter's cost table, when the engine starts."""
    plain = Toy.forward

    def forward(self: Any, batch: Any, plan: Any) -> Any:
        if len(batch.token_ids) > most:
            raise RuntimeError(FULL)
        return plain(self, batch, plan)

    directory = write_toy(tmp_path / "toy", "Count")
    settings = {"speculation__method": "ngram", "speculation__schedule": "confidence"}
    with monkeypatch.context() as patched:
        patched.setattr(Toy, "forward", forward)
        llm = open_toy(directory, **settings, plugins__spec_decode__cost_cache="off")
    source = llm.explain()["facts"]["cost table"]
    assert source.startswith("measured now, 3 step sizes up to 3 rows" if most else "none: the memory has no room")
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=8))
    assert output.outputs[0].token_ids == count_tokens([7], 8, 64)
    llm.close()


def test_rows_are_measured_apart_and_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the schedule asks: a row of each of many requests, or several of each, the last with what is left over."""
    plain, seen = Toy.forward, list[tuple[list[int], list[int]]]()

    def forward(self: Any, batch: Any, plan: Any) -> Any:
        layout = next(iter(batch.layouts.values()))
        seen.append((layout.host_query_lens.tolist(), batch.positions.tolist()))
        return plain(self, batch, plan)

    directory = write_toy(tmp_path / "toy", "Count")
    settings = {"speculation__method": "ngram", "speculation__schedule": "confidence"}
    llm = open_toy(directory, **settings, plugins__spec_decode__cost_cache="off")
    probe = StepProbe(llm.engine.core.runner)
    with monkeypatch.context() as patched:
        patched.setattr(Toy, "forward", forward)
        assert probe.seconds(3) > 0
        assert probe.seconds(10, 4) > 0
    first = seen[0][1][0]
    assert seen[0] == ([1, 1, 1], [first] * 3)
    assert seen[1] == ([4, 4, 2], [first + place for place in (0, 1, 2, 3, 0, 1, 2, 3, 0, 1)])
    llm.close()
