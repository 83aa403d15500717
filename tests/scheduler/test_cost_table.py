"""The cost table: fitted to steps whose cost is known, asked, written and read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deepinfer_scheduler.cost_table import DEFAULT, CostTable, fit, read_table, write_table
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_core.api import ConfigError
from deepinfer_core.api.simulation import StepProfile, StepSample, StepShape

TRUE = CostTable(
    rows=[[1, 0.02], [2, 0.022], [4, 0.027], [8, 0.03], [16, 0.04], [32, 0.06], [64, 0.09]],
    sampled=[[1, 0.0], [2, 0.001], [4, 0.002], [8, 0.004], [16, 0.006]],
    prefill_context=2e-7,
    decode_context=3e-6,
)


def steps(random: np.random.Generator, count: int) -> list[StepShape]:
    shapes = []
    for _ in range(count):
        decode, prefill = int(random.integers(0, 17)), int(random.integers(0, 49) * (random.random() < 0.5))
        if decode + prefill:
            shapes.append(
                StepShape(
                    prefill,
                    decode,
                    max(1, decode),
                    int(prefill * random.integers(0, 2000)),
                    int(decode * random.integers(1, 2000)),
                )
            )
    shapes.append(StepShape(64, 0, 1, 2080, 0))
    shapes.append(StepShape(0, 16, 16, 0, 99))
    return shapes


def profile(shapes: list[StepShape], seconds: list[float]) -> StepProfile:
    samples = [StepSample(shape=shape, seconds=value) for shape, value in zip(shapes, seconds, strict=True)]
    return StepProfile(facts={"model": "M"}, samples=samples)


def test_the_fit_finds_what_made_the_steps() -> None:
    shapes = steps(np.random.default_rng(0), 600)
    table = fit(profile(shapes, [TRUE.seconds(shape) for shape in shapes]))
    for shape in steps(np.random.default_rng(1), 200):
        assert table.seconds(shape) == pytest.approx(TRUE.seconds(shape), rel=1e-6)
    assert table.facts["median_error"] < 1e-9
    assert table.facts["model"] == "M"


def test_disturbed_steps_are_left_out() -> None:
    random = np.random.default_rng(2)
    shapes = steps(random, 800)
    noise = 1 + 0.02 * random.standard_normal(len(shapes))
    noise[random.random(len(shapes)) < 0.08] *= 5
    table = fit(profile(shapes, [TRUE.seconds(s) * n for s, n in zip(shapes, noise.tolist(), strict=True)]))
    errors = [abs(table.seconds(s) / TRUE.seconds(s) - 1) for s in steps(np.random.default_rng(3), 200)]
    assert np.median(errors) < 0.02
    assert max(errors) < 0.1
    assert table.facts["left_out"] >= (noise > 2).sum()


def test_no_price_is_below_zero_and_no_larger_step_is_cheaper() -> None:
    random = np.random.default_rng(4)
    shapes = steps(random, 200)
    table = fit(profile(shapes, (0.01 + 0.03 * random.random(len(shapes))).tolist()))
    assert min(table.prefill_context, table.decode_context) >= 0
    assert (np.diff(table.rows[:, 1]) >= 0).all()
    assert (np.diff(table.sampled[:, 1]) >= 0).all()


def test_a_few_steps_are_no_profile() -> None:
    with pytest.raises(ConfigError, match="3 measured steps: expected at least 8"):
        fit(profile([StepShape(1, 0, 1, 1, 0)] * 3, [1.0] * 3))


@given(st.integers(1, 200), st.integers(0, 10**6), st.integers(1, 300))
def test_a_stretch_costs_bitwise_what_its_steps_cost(rows: int, context: int, count: int) -> None:
    one_by_one = [TRUE.seconds(StepShape(0, rows, rows, 0, context + k * rows)) for k in range(count)]
    assert TRUE.decode_seconds(rows, context, count).tolist() == one_by_one


@pytest.mark.parametrize(("tokens", "seconds"), [(1, 0.02), (3, 0.0245), (64, 0.09), (128, 0.09 + 64 * 0.03 / 32)])
def test_between_points_and_beyond_them(tokens: int, seconds: float) -> None:
    assert TRUE.seconds(StepShape(tokens, 0, 0, 0, 0)) == pytest.approx(seconds)


def test_survives_its_file(tmp_path: Path) -> None:
    write_table(TRUE, tmp_path / "t.json")
    table = read_table(tmp_path / "t.json")
    assert table.rows.tolist() == TRUE.rows.tolist()
    assert table.sampled.tolist() == TRUE.sampled.tolist()
    assert (table.prefill_context, table.decode_context) == (TRUE.prefill_context, TRUE.decode_context)


def test_the_default_says_what_it_was_measured_on() -> None:
    facts = read_table(DEFAULT).facts
    assert {"model", "accelerator", "dtype", "threads", "torch", "median_error"} <= set(facts)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "x"}, "expected format="),
        ({"version": 2}, "expected format="),
        ({"rows": []}, r"rows: expected a list of \[count, seconds\]"),
        ({"rows": [[1, -1]]}, "numbers >= 0"),
        ({"rows": [[2, 1], [1, 1]]}, "ascending"),
        ({"rows": [[0, 1]]}, "counts from 1 up"),
        ({"sampled": [[1, 2, 3]]}, "sampled: expected"),
        ({"prefill_context": None}, "prefill_context=None: expected seconds >= 0"),
        ({"decode_context": True}, "decode_context=True"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    write_table(TRUE, tmp_path / "t.json")
    data = json.loads((tmp_path / "t.json").read_text())
    (tmp_path / "t.json").write_text(json.dumps({**data, **change}))
    with pytest.raises(ConfigError, match=said):
        read_table(tmp_path / "t.json")


def test_no_file_and_no_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_table(tmp_path / "none")
    (tmp_path / "t.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON; write one with `deepinfer profile-steps`"):
        read_table(tmp_path / "t.json")
