"""Profiles of step costs: which points are measured, in how much time, and what of them counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
from toys.checkpoints import toy_settings, write_toy
from toys.models import Toy

from deepinfer_core.api.simulation import StepProfile, profile_steps
from deepinfer_core.engine import step_profile
from deepinfer_core.engine.intake import Limits
from deepinfer_core.engine.profile_grid import grid

COMPILING = 20.0


class Machine:
    """A clock that model runs advance: half a second each, and a hundredth for each row."""

    def __init__(self, compiles: bool = False) -> None:
        self.now = 0.0
        self.ran: list[int] = []
        self.compiled: set[int] = set()
        self.compiles = compiles

    def runs(self, rows: int) -> None:
        self.ran.append(rows)
        self.now += 0.5 + 0.01 * rows
        if self.compiles and rows not in self.compiled:
            self.compiled.add(rows)
            self.now += COMPILING

    def clock(self) -> float:
        self.now += 1e-6
        return self.now


def profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Machine, **more: Any
) -> tuple[StepProfile, list[float]]:
    directory, plain = tmp_path / "toy", Toy.forward
    if not directory.exists():
        write_toy(directory, "PrefixHash", max_len=1024)

    def forward(self: Any, batch: Any, plan: Any) -> Any:
        machine.runs(len(batch.token_ids))
        return plain(self, batch, plan)

    monkeypatch.setattr(Toy, "forward", forward)
    monkeypatch.setattr(step_profile, "time", SimpleNamespace(monotonic=machine.clock))
    settings = toy_settings(
        **{
            "model.path": str(directory),
            "kv_cache.block_size": 16,
            "kv_cache.num_blocks": 600,
            "scheduling.max_batch_tokens": 128,
        }
    )
    shares: list[float] = []
    settings = {name: value for name, value in settings.items() if not name.startswith("logging.progress")}
    found = profile_steps(
        settings, clock=machine.clock, progress=lambda text: None, share=shares.append, **{"rounds": 2, **more}
    )
    monkeypatch.setattr(Toy, "forward", plain)
    return found, shares


def limits(**more: Any) -> Limits:
    fields: dict[str, Any] = {field.name: None for field in attrs.fields(Limits)}
    return Limits(
        **fields | {"max_model_len": 8192, "capacity": 60_000, "max_running": 64, "max_batch_tokens": 2048} | more
    )


def test_the_grid_goes_as_far_as_the_limits() -> None:
    points = grid(limits())
    sizes = [point.size(2048) for point in points]
    assert sizes == sorted(sizes)
    alone = {p.requests[0].fresh for p in points if len(p.requests) == 1 and not p.requests[0].shared}
    assert alone == {*(1 << bit for bit in range(12)), 8191}
    decoding = [(len(p.requests), p.requests[0].shared) for p in points if p.decodes]
    assert [count for count, context in decoding if context == 8] == [1, 2, 4, 8, 16, 32, 64]
    assert sorted(decoding)[-1] == (64, 512)
    assert (16, 2048) in decoding
    for point in grid(limits(max_model_len=40, max_running=1, max_batch_tokens=7)):
        assert max(each.shared + each.fresh + each.output for each in point.requests) <= 40
        assert len(point.requests) == 1


def test_a_profile_runs_the_whole_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    found, shares = profiled(tmp_path, monkeypatch, machine)
    assert found.facts["points_left_out"] == 0
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    shapes = [sample.shape for sample in found.samples]
    assert max(shape.decode for shape in shapes) == 16
    assert max(shape.tokens for shape in shapes) == 128
    # Prefixes are computed once, whatever the rounds: measured steps continue them, or decode after them.
    continued = [shape for shape in shapes if shape.prefill == 64 and shape.prefill_context > 64 * 128]
    assert {shape.prefill_context for shape in continued} >= {64 * context + 32 * 65 for context in (128, 512)}
    once, _ = profiled(tmp_path, monkeypatch, again := Machine(), rounds=1)
    assert len(found.samples) == 2 * len(once.samples)
    assert sum(machine.ran) - sum(again.ran) < 0.5 * sum(again.ran)
    for sample in found.samples:
        assert sample.seconds == pytest.approx(0.5 + 0.01 * sample.shape.tokens, abs=1e-3)


@pytest.mark.parametrize("seconds", [0.001, 150.0, 400.0])
@pytest.mark.parametrize("compiles", [False, True])
def test_a_profile_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, compiles: bool
) -> None:
    """What compiles takes nothing from the time: the same points are measured."""
    machine = Machine(compiles)
    found, shares = profiled(tmp_path, monkeypatch, machine, seconds=seconds)
    whole = len(grid(limits(max_model_len=1024, capacity=599 * 16, max_running=16, max_batch_tokens=128)))
    assert found.facts["points"] + found.facts["points_left_out"] == whole
    assert (found.facts["points"] == 8) == (seconds < 1)
    assert found.facts["points"] < whole
    assert shares[-1] == pytest.approx(1.0)
    spent = machine.now - COMPILING * len(machine.compiled)
    assert spent < max(1.02 * seconds, 25)
    assert spent > 0.8 * seconds
    sizes = np.array([sample.shape.tokens for sample in found.samples])
    assert len(sizes) >= 8
    assert sizes.max() <= (64 if seconds < 1 else 128)
    assert max(sample.seconds for sample in found.samples) < COMPILING
