"""What an engine records of itself agrees with what it did."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from toys.checkpoints import ToyLLM

from deepinfer_core import SamplingParams
from deepinfer_core.api import ConfigError
from deepinfer_core.engine.trace_file import Trace, read_trace


def greedy(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)


def recorded(
    toy_llm: ToyLLM, path: Path, prompts: list[Any], params: Any, *, rounds: int = 1, **settings: Any
) -> tuple[Trace, list[Any]]:
    llm = toy_llm("PrefixHash", logging__trace_file=str(path), **settings)
    outputs = [output for _ in range(rounds) for output in llm.generate(prompts, params)]
    llm.close()
    return read_trace(path), outputs


def test_the_header_describes_the_engine(toy_llm: ToyLLM, tmp_path: Path) -> None:
    header = recorded(toy_llm, tmp_path / "t", [[1]], greedy(1))[0].header
    assert (header.block_size, header.max_batch_tokens, header.max_running) == (4, 64, 16)
    assert (dict(header.num_blocks), header.model, header.policy) == ({"full": 64}, "ToyPrefixHash", "engine:fcfs")


def test_arrivals_and_ends_are_the_requests(toy_llm: ToyLLM, tmp_path: Path) -> None:
    params = [greedy(4), SamplingParams(n=2, seed=3, temperature=0.5, top_k=7, max_tokens=6, stop_token_ids=[63])]
    prompts = [{"prompt_token_ids": [*range(9)], "tenant": "x", "priority": 3, "ttft_target_ms": 250}, [5, 6]]
    trace, outputs = recorded(toy_llm, tmp_path / "t", prompts, params)
    first, second = trace.arrivals
    assert [a.id for a in trace.arrivals] == [o.request_id for o in outputs]
    assert (first.prompt, first.max_tokens, first.n, first.temperature, first.seeded) == (9, 4, 1, 0.0, False)
    assert (first.tenant, first.priority, first.ttft_target, first.deadline) == ("x", 3, 0.25, None)
    assert (second.prompt, second.n, second.temperature, second.top_k, second.seeded) == (2, 2, 0.5, 7, True)
    assert second.stops == 1
    ended = {(f.id, f.child): (f.output, f.reason) for f in trace.finishes}
    assert ended == {(o.request_id, c.index): (len(c.token_ids), c.finish_reason) for o in outputs for c in o.outputs}


def test_steps_account_for_every_token(toy_llm: ToyLLM, tmp_path: Path) -> None:
    prompts = [[i] * (3 * i + 1) for i in range(1, 9)]
    trace, outputs = recorded(toy_llm, tmp_path / "t", prompts, greedy(6), scheduling__max_batch_tokens=16)
    cached = sum(o.metrics.cached_tokens for o in outputs)
    assert sum(step.prefill for step in trace.steps) == sum(map(len, prompts)) - cached
    assert sum(step.output for step in trace.steps) == 8 * 6
    assert all(step.prefill <= step.tokens <= 16 for step in trace.steps)
    assert all(step.requests <= step.tokens for step in trace.steps)


def test_times_are_on_one_clock_that_begins_with_the_recording(toy_llm: ToyLLM, tmp_path: Path) -> None:
    trace, outputs = recorded(toy_llm, tmp_path / "t", [[1], [2]], greedy(5), rounds=3)
    assert all(before.time < after.time for before, after in pairwise(trace.steps))
    assert trace.arrivals[0].time >= 0
    for arrival, output in zip(trace.arrivals, outputs, strict=True):
        end = next(f.time for f in trace.finishes if f.id == arrival.id)
        assert end - arrival.time == pytest.approx(output.metrics.timeline[-1].time - output.metrics.arrival, abs=1e-6)


def test_equal_block_numbers_mean_equal_beginnings(toy_llm: ToyLLM, tmp_path: Path) -> None:
    shared = [*range(10)]
    prompts = [
        [*shared, 1, 2, 3], [*shared, 1, 2, 4], [*shared], [9, *shared], [*shared, 40, 41, 42, 43, 44, 45],
        [*range(8), *range(4)], [0, 1, 2],
    ]  # fmt: skip
    trace, _ = recorded(toy_llm, tmp_path / "t", prompts, greedy(1))
    blocks = [arrival.blocks for arrival in trace.arrivals]
    assert [len(numbers) for numbers in blocks] == [len(prompt) // 4 for prompt in prompts]
    for one, numbers in zip(prompts, blocks, strict=True):
        for other, others in zip(prompts, blocks, strict=True):
            for place, (mine, yours) in enumerate(zip(numbers, others, strict=False)):
                end = 4 * (place + 1)
                assert (mine == yours) == (one[:end] == other[:end])


def test_a_salt_keeps_equal_prompts_apart(toy_llm: ToyLLM, tmp_path: Path) -> None:
    ids = [*range(8)]
    prompts = [{"prompt_token_ids": ids, "cache_salt": salt} for salt in ("a", "b", "a")]
    trace, _ = recorded(toy_llm, tmp_path / "t", prompts, greedy(1))
    one, two, three = (arrival.blocks for arrival in trace.arrivals)
    assert one == three
    assert set(one).isdisjoint(two)


def test_hits_follow_from_the_block_numbers(toy_llm: ToyLLM, tmp_path: Path) -> None:
    """A cache that keeps everything would have hit what it did hit: what a simulator needs."""
    prompts = [[*range(13)], [*range(9), 50, 51, 52, 53], [*range(13)], [60, *range(12)]]
    path = tmp_path / "t"
    llm = toy_llm("PrefixHash", logging__trace_file=str(path))
    hits = [llm.generate([prompt], greedy(1))[0].metrics.cached_tokens for prompt in prompts]
    llm.close()
    seen: set[int] = set()
    for arrival, hit in zip(read_trace(path).arrivals, hits, strict=True):
        run = next((i for i, number in enumerate(arrival.blocks) if number not in seen), len(arrival.blocks))
        assert hit == min(4 * run, arrival.prompt - 1)
        seen.update(arrival.blocks)


def test_no_token_is_in_the_file(toy_llm: ToyLLM, tmp_path: Path) -> None:
    recorded(toy_llm, tmp_path / "t", [[61, 62, 63, 60, 59]], greedy(3))
    arrival = next(json.loads(line) for line in (tmp_path / "t").read_text().splitlines() if '"arrival"' in line)
    assert arrival["blocks"] == [0]
    assert {value for value in arrival.values() if isinstance(value, int)}.isdisjoint({59, 60, 61, 62, 63})


def test_an_aborted_request_is_in_the_trace_with_its_end(toy_llm: ToyLLM, tmp_path: Path) -> None:
    llm = toy_llm("Count", logging__trace_file=str(tmp_path / "t"))
    core = llm.engine.core
    core.add([llm.engine.intake.request("r", [1, 2], greedy(9), now=core.clock(), stream=False)])
    core.abort(["r"])
    llm.close()
    trace = read_trace(tmp_path / "t")
    assert [(f.id, f.output, f.reason) for f in trace.finishes] == [("r", 0, "abort")]


def test_a_trace_that_cannot_be_written_is_one_line(toy_llm: ToyLLM, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"logging.trace_file = '/no/such/t': its folder does not exist"):
        toy_llm("Count", logging__trace_file="/no/such/t")
    with pytest.raises(ConfigError, match=r"logging.trace_file = .*: Is a directory"):
        toy_llm("Count", logging__trace_file=str(tmp_path))
