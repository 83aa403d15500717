"""The simulator against the engine: given the recorded times of its steps, it makes the same steps."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from deepinfer_scheduler.plugin import deepinfer_scheduling
from toys.checkpoints import ToyLLM

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.api import ConfigError
from deepinfer_core.api.simulation import SimulatedResult, named_policy, read_recorded, replay
from deepinfer_core.config import load_config
from deepinfer_core.engine.open_engine import open_engine
from deepinfer_core.engine.outputs import RequestOutput

POLICIES = ["fcfs", *(info.name for info in deepinfer_scheduling())]


def record(llm: LLM, seed: int, count: int = 40) -> list[RequestOutput]:
    """Requests that come in heaps while others run, share prefixes and have several completions.

    They are sampled, so that no two say the same: a trace does not tell which outputs share blocks.
    """
    source = random.Random(seed)
    core: Any = llm.engine.core
    requests = []
    for number in range(count):
        shared = source.randrange(12)
        prompt = {
            "prompt_token_ids": [*range(shared), *[20 + number % 40] * source.randrange(1, 20)],
            "priority": source.randrange(3),
            "tenant": source.choice("abc"),
            "ttft_target_ms": source.choice([1e5, 2e5]),  # far off: a clock read microseconds later changes nothing
            "tpot_target_ms": source.choice([1, 100]),
        }
        params = SamplingParams(
            n=source.choice([1, 1, 1, 3]),
            temperature=1.5,
            seed=number,
            max_tokens=source.randrange(1, 25),
            ignore_eos=True,
        )
        made = llm.engine.intake.request(str(number), prompt, params, now=core.clock(), stream=False)
        requests.append(made)
        core.add([made])
        for _ in range(source.choice([0, 0, 1, 3, 12])):
            core.step()
    while core.has_unfinished:
        core.step()
    return [llm.output(request) for request in requests]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_steps(toy_llm: ToyLLM, tmp_path: Path, policy: str, seed: int) -> None:
    llm = toy_llm(
        "PrefixHash", logging__trace_file=str(tmp_path / "t"), scheduling__policy=policy, kv_cache__num_blocks=40,
        scheduling__max_batch_tokens=16, scheduling__max_running=6,
    )  # fmt: skip
    outputs = record(llm, seed)
    preempted = llm.engine.core.planner.preemption.count
    llm.close()
    trace = read_recorded(tmp_path / "t")
    results: dict[str, SimulatedResult] = {}
    steps = replay(trace, named_policy(policy), lambda result: results.update({result.request.id: result}))
    assert [attrs.astuple(step) for step in steps] == [attrs.astuple(step) for step in trace.steps]
    assert trace.unfinished == 0
    for output in outputs:
        result = results[output.request_id]
        assert result.cached == output.metrics.cached_tokens
        assert result.preemptions == output.metrics.preemptions
        assert result.output == sum(len(completion.token_ids) for completion in output.outputs)
    assert sum(output.metrics.preemptions for output in outputs) == preempted


def test_requests_that_never_ended_are_left_out(toy_llm: ToyLLM, tmp_path: Path) -> None:
    llm: Any = toy_llm("PrefixHash", logging__trace_file=str(tmp_path / "t"))
    made = llm.engine.intake.request("x", [1, 2], SamplingParams(max_tokens=50), now=0.0, stream=False)
    llm.engine.core.add([made])
    llm.engine.core.step()
    llm.generate([[3]], SamplingParams(temperature=0, max_tokens=2))
    llm.close()
    trace = read_recorded(tmp_path / "t")
    assert (trace.unfinished, [request.prompt for request in trace.requests]) == (1, [1])


def test_a_trace_without_steps_is_refused(toy_llm: ToyLLM, tmp_path: Path) -> None:
    toy_llm("PrefixHash", logging__trace_file=str(tmp_path / "t")).close()
    with pytest.raises(ConfigError, match="the trace holds no step"):
        replay(read_recorded(tmp_path / "t"), named_policy("fcfs"), lambda result: None)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fcfs", "latency"])
def test_a_real_model_step_by_step_and_within_one_percent(tmp_path: Path, policy: str) -> None:
    """The demo model, on a clock of processor time, so that it matters little what else the machine does."""
    settings: dict[str, Any] = {
        "model.path": "demo",
        "accelerator": "cpu",
        "kv_cache.num_blocks": 513,
        "scheduling.max_batch_tokens": 128,
        "scheduling.max_running": 8,
        "scheduling.policy": policy,
        "logging.trace_file": str(tmp_path / "t"),
        "logging.progress": False,
    }
    source = np.random.default_rng(0)
    engine = open_engine(load_config(overrides=settings), clock=time.process_time)
    core, requests = engine.core, []
    for number in range(24):
        ids = source.integers(300, 40_000, int(source.integers(4, 200))).tolist()
        params = SamplingParams(temperature=0, max_tokens=int(source.integers(4, 40)), ignore_eos=True)
        requests.append(engine.intake.request(str(number), ids, params, now=core.clock(), stream=False))
        core.add(requests[-1:])
        for _ in range(int(source.integers(0, 12))):
            core.step()
    while core.has_unfinished:
        core.step()
    engine.close()
    trace = read_recorded(tmp_path / "t")
    results: dict[str, SimulatedResult] = {}
    steps = replay(trace, named_policy(policy), lambda result: results.update({result.request.id: result}))
    assert [attrs.astuple(step) for step in steps] == [attrs.astuple(step) for step in trace.steps]
    for request in requests:
        result, measured = results[request.request_id], request.metrics
        assert measured.ttft is not None
        assert result.ttft == pytest.approx(measured.ttft, rel=0.01)
        assert result.tpot == pytest.approx(measured.tpot, rel=0.01)
        assert result.finished - result.request.arrival == pytest.approx(measured.e2e, rel=0.01)
