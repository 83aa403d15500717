"""The engine on a stranger's device: its own tests pass there, and a missing synchronisation does not."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import structlog
from toys.checkpoints import toy_settings, write_toy
from toys.engine_suite import run_engine_tests
from toys.oracle import HashOracle, count_tokens
from toys.tiny_llama import write_tiny

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.engine import runner as engine_runner

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def test_the_engines_tests_pass_on_it(site: Path) -> None:
    assert run_engine_tests("fake", site) > 300


def open_on(backend: str, directory: Path, **settings: Any) -> LLM:
    return LLM(directory, accelerator=backend, **toy_settings(**settings))


def test_nobody_gets_it_unasked(tmp_path: Path) -> None:
    with open_on("auto", write_toy(tmp_path, "Count")) as llm:
        assert llm.explain()["plan"]["accelerator"] == "cpu"


def test_its_operators_are_its_own_and_the_rest_is_the_reference_with_a_warning(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs, open_on("fake", write_tiny(tmp_path)) as llm:
        rows = {row["op"]: row["provider"] for row in llm.explain()["rows"] if row["provider"] != "parts"}
        loop = llm.explain()["facts"]["loop"]
    own = {op for op, provider in rows.items() if provider.startswith("fake:")}
    assert own == {"kv_layout.paged", "gemm.linear", "pointwise.rms_norm", "runner.append_tokens"}
    assert {provider.partition(":")[0] for op, provider in rows.items() if op not in own} == {"reference"}
    warned = {entry["op"] for entry in logs if entry["event"] == "reference_fallback"}
    assert warned == set(rows) - own
    assert loop == "one step ahead"


def test_all_memory_comes_back(tmp_path: Path, pool: Any) -> None:
    directory = write_tiny(tmp_path)
    used = []
    for _ in range(3):
        with open_on("fake", directory) as llm:
            assert pool.used > 10_000
            llm.generate([[1, 2, 3]], GREEDY)
        del llm
        gc.collect()
        used.append(pool.used)
    assert used[0] == used[1] == used[2]


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is not referred to any more is gone at once; what refers to itself stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_steps_that_do_not_fit_become_smaller_until_they_do(tmp_path: Path, pool: Any) -> None:
    """What the steps that failed took is free when the next is tried, whether or not the collector ran."""
    directory = write_tiny(tmp_path)
    prompts = [[n + i for i in range(40)] for n in range(6)]
    with open_on("fake", directory, kv_cache__num_blocks=129, scheduling__max_batch_tokens=256) as llm:
        wanted = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)]
    with open_on("fake", directory, kv_cache__num_blocks=129, scheduling__max_batch_tokens=256) as llm:
        pool.capacity = pool.used + 40_000  # a step of 60 rows takes about 1,000 bytes a row
        outputs = llm.generate(prompts, GREEDY)
        assert llm.engine.core.planner.budget < 256
    assert [o.error for o in outputs] == [None] * len(prompts)
    assert [o.outputs[0].token_ids for o in outputs] == wanted


# ---- it bites


def reuse_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classic mistake: the host keeps one array for a step's positions, and fills it again for the next."""
    original = engine_runner.step_inputs
    buffer = np.zeros(1024, np.int64)

    def step_inputs(*arguments: Any) -> Any:
        inputs = original(*arguments)
        count = len(inputs.positions)
        buffer[:count] = inputs.positions
        return attrs.evolve(inputs, positions=buffer[:count])

    monkeypatch.setattr(engine_runner, "step_inputs", step_inputs)


@pytest.mark.parametrize("planted", [False, True])
def test_a_host_buffer_that_is_used_again_too_early_shows(
    planted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepinfer_fake.device.DELAY", 60.0)
    directory = write_toy(tmp_path, "PrefixHash")
    if planted:
        reuse_one_buffer(monkeypatch)
    prompt = [5, 9, 2, 7]
    wanted = HashOracle(64, [None]).tokens(prompt, 12)
    with open_on("cpu", directory) as llm:
        assert llm.generate([prompt], GREEDY)[0].outputs[0].token_ids == wanted
    with open_on("fake", directory) as llm:
        found = llm.generate([prompt], GREEDY)[0].outputs[0].token_ids
    assert (found == wanted) == (not planted)


def test_a_result_that_is_read_without_waiting_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy writes its result into a tensor that the host looks at directly."""
    monkeypatch.setattr("deepinfer_fake.device.DELAY", 60.0)
    directory = write_toy(tmp_path, "Count")
    seen: dict[str, list[int]] = {}
    for backend in ("cpu", "fake"):
        with open_on(backend, directory) as llm:
            core: Any = llm.engine.core
            request: Any = llm.engine.intake.request("0", [3], GREEDY, now=0.0, stream=False)
            core.add([request])
            step = core.runner.launch(core.planner.plan())
            seen[backend] = core.runner.state.sampling.history[0, :2].tolist()
            step.event.wait()
            assert core.runner.state.sampling.history[0, :2].tolist() == count_tokens([2], 2, 64)
    assert seen == {"cpu": [3, 4], "fake": [0, 0]}
