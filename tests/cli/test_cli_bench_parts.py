"""The benchmark's parts: arrivals, the loop that sends, percentiles, and operator stand-ins."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from scipy import stats
from toys.checkpoints import ToyLLM

from deepinfer_core import SamplingParams
from deepinfer_core.api import Choice
from deepinfer_core.cli.bench_load import LoadItem, synthetic_load, trace_load
from deepinfer_core.cli.bench_ops import OpTimer
from deepinfer_core.cli.bench_report import op_rows, spread
from deepinfer_core.cli.bench_run import run_load
from deepinfer_core.engine.trace_file import Arrival, Trace, TraceHeader


def load(**changes: Any) -> list[LoadItem]:
    shape: dict[str, Any] = {
        "num_prompts": 6, "input_len": 5, "output_len": 3, "request_rate": None, "seed": 1, "vocab_size": 50,
        "max_model_len": 64,
    }  # fmt: skip
    return synthetic_load(**shape | changes)


def ids(item: LoadItem) -> list[int]:
    found: list[int] = item.prompt["prompt_token_ids"]
    return found


# ---- synthetic loads


def test_prompts_are_of_the_vocabulary_and_differ() -> None:
    items = load(num_prompts=40)
    assert all(len(ids(item)) == 5 and min(ids(item)) >= 0 and max(ids(item)) < 50 for item in items)
    assert len({tuple(ids(item)) for item in items}) == 40
    assert {item.at for item in items} == {0.0}


def test_a_seed_gives_the_same_load_again() -> None:
    assert load(request_rate=3.0) == load(request_rate=3.0)
    assert load() != load(seed=2)


def test_gaps_are_exponential_with_the_rate() -> None:
    times = [item.at for item in load(num_prompts=3001, request_rate=8.0)]
    assert times[0] == 0
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    assert stats.kstest(gaps, "expon", args=(0, 1 / 8)).pvalue > 0.001


# ---- traces


def trace(*arrivals: Arrival) -> Trace:
    header = TraceHeader(block_size=4, max_batch_tokens=64, max_running=4)
    return Trace(header=header, arrivals=arrivals, steps=(), finishes=())


def replayed(*arrivals: Arrival, time_scale: float = 1.0) -> list[LoadItem]:
    return trace_load(trace(*arrivals), time_scale=time_scale, seed=0, vocab_size=1000, max_model_len=64)


def arrival(number: int, **changes: Any) -> Arrival:
    fields: dict[str, Any] = {"time": 5.0 + number, "id": str(number), "prompt": 11, "max_tokens": 3, "n": 1}
    return Arrival(**fields | changes)


def test_prompts_agree_exactly_where_their_blocks_do() -> None:
    blocks = [(0, 1), (0, 2), (0, 1), (), (5, 1)]
    items = replayed(*(arrival(i, blocks=numbers) for i, numbers in enumerate(blocks)))
    for (one, mine), (other, yours) in itertools.combinations(zip(items, blocks, strict=True), 2):
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(mine, yours, strict=False)))
        equal = [a == b for a, b in zip(ids(one), ids(other), strict=True)]
        assert all(equal[: 4 * same])
        assert not all(equal[4 * same :])
    assert {len(ids(item)) for item in items} == {11}


def test_times_begin_with_the_first_arrival_and_scale() -> None:
    both = (arrival(0), arrival(3))
    assert [item.at for item in replayed(*both)] == [0.0, 3.0]
    assert [item.at for item in replayed(*both, time_scale=0.5)] == [0.0, 1.5]


def test_request_fields_come_along() -> None:
    item = replayed(arrival(0, tenant="x", priority=2, deadline=6.5, ttft_target=0.25, n=2, temperature=0.5, top_k=9))[
        0
    ]
    assert {k: v for k, v in item.prompt.items() if k != "prompt_token_ids"} == {
        "tenant": "x", "priority": 2, "deadline_ms": 1500.0, "ttft_target_ms": 250.0,
    }  # fmt: skip
    assert (item.params.n, item.params.temperature, item.params.top_k, item.params.ignore_eos) == (2, 0.5, 9, True)


def test_a_deadline_that_was_over_is_left_out() -> None:
    assert "deadline_ms" not in replayed(arrival(0, deadline=4.0))[0].prompt


# ---- the loop


def items(count: int, *, at: float = 0.0) -> list[LoadItem]:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    return [LoadItem(prompt={"prompt_token_ids": [i, 1]}, params=params, at=at * i) for i in range(count)]


@pytest.mark.parametrize("concurrency", [1, 3, None])
def test_no_more_requests_than_allowed_are_inside(toy_llm: ToyLLM, concurrency: int | None) -> None:
    engine = toy_llm("Count").engine
    inside: list[int] = []
    engine.model.before = lambda batch: inside.append(len(engine.core.requests))  # type: ignore[attr-defined]
    run = run_load(engine, items(7), concurrency=concurrency, progress=lambda finished, tokens: None)
    assert max(inside) == (concurrency or 7)
    assert [r.sequences[0].finish_reason for r in run.requests] == ["length"] * 7


def test_without_a_limit_time_runs_from_when_a_request_was_due(toy_llm: ToyLLM) -> None:
    engine = toy_llm("Count").engine
    run = run_load(engine, items(4, at=0.01), concurrency=None, progress=lambda finished, tokens: None)
    assert [r.metrics.arrival - run.start for r in run.requests] == pytest.approx([0.0, 0.01, 0.02, 0.03])


def test_progress_adds_up(toy_llm: ToyLLM) -> None:
    seen = np.zeros(2)

    def progress(finished: int, tokens: int) -> None:
        seen[:] += (finished, tokens)

    run_load(toy_llm("Count").engine, items(5), concurrency=2, progress=progress)
    assert seen.tolist() == [5, 25]


def test_steps_are_watched_only_during_the_run(toy_llm: ToyLLM) -> None:
    llm = toy_llm("Count")
    run = run_load(llm.engine, items(2), concurrency=None, progress=lambda finished, tokens: None)
    assert sum(step.output_tokens for step in run.steps) == 10
    count = len(run.steps)
    llm.generate([[1]], SamplingParams(max_tokens=3))
    assert len(run.steps) == count


# ---- figures


def test_percentiles_are_linear_between_ranks() -> None:
    found = spread([3.0, None, 1.0, 2.0, 4.0, 5.0], 10.0)
    assert found == pytest.approx({"median": 30.0, "p90": 46.0, "p99": 49.6, "mean": 30.0})
    assert spread([None], 1.0) is None


def test_what_no_operator_took_is_a_row_of_its_own() -> None:
    timer = OpTimer()
    op = timer.wrap(choice("cpu"), Op())
    op.run(1)
    seconds = timer.rows()[0].seconds
    rows = op_rows(timer.rows(), device_seconds=seconds * 4)
    assert [row["share"] for row in rows] == pytest.approx([0.25, 0.75])
    assert rows[-1]["calls"] is None


# ---- operator stand-ins


class Op:
    scale = 3

    def prepare(self, weight: int) -> int:
        return weight + 1

    def run(self, x: int, *, twice: bool = False) -> int:
        return x * self.scale * (2 if twice else 1)

    def plan(self) -> str:
        raise ZeroDivisionError


def choice(device: str, op: str = "gemm.linear") -> Choice:
    return Choice(slot="s", op=op, request={"device_type": device}, provider="p:q", score=1, reason="", source="score")


@pytest.fixture
def timed() -> tuple[Any, OpTimer]:
    timer = OpTimer()
    return timer.wrap(choice("cpu"), Op()), timer


def test_a_stand_in_does_what_the_operator_does(timed: tuple[Any, OpTimer]) -> None:
    op, timer = timed
    assert (op.run(2), op.run(2, twice=True), op.prepare(5), op.scale) == (6, 12, 6, 3)
    assert [(row.method, row.calls) for row in timer.rows()] == [("run", 2)]  # preparing is not part of a step


def test_what_an_operator_raises_is_raised_and_counted(timed: tuple[Any, OpTimer]) -> None:
    op, timer = timed
    with pytest.raises(ZeroDivisionError):
        op.plan()
    assert timer.rows()[0].calls == 1


def test_what_an_operator_lacks_its_stand_in_lacks(timed: tuple[Any, OpTimer]) -> None:
    with pytest.raises(AttributeError, match="nothing"):
        timed[0].nothing()


def test_a_reset_forgets_what_was_counted(timed: tuple[Any, OpTimer]) -> None:
    op, timer = timed
    op.run(1)
    timer.reset()
    assert timer.rows() == []
    op.run(1)
    assert timer.rows()[0].calls == 1


@pytest.mark.parametrize(("device", "waits"), [("cpu", 0), ("other", 2)])
def test_only_a_device_that_runs_behind_is_waited_for(device: str, waits: int) -> None:
    waited: list[int] = []
    op = OpTimer(lambda: waited.append(1)).wrap(choice(device), Op())
    op.run(1)
    op.run(1)
    assert len(waited) == waits


def test_layouts_stay_as_they_are() -> None:
    layout = Op()
    assert OpTimer().wrap(choice("cpu", "kv_layout.paged"), layout) is layout
