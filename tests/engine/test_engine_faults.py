"""Fault containment: interrupts, NaN rows, raising models and policies. The engine goes on, the others are unharmed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from toys.checks import assert_clean, ends_of, ids_of
from toys.oracle import HashOracle, count_tokens

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.api import ModelBatch

GREEDY = SamplingParams(temperature=0, max_tokens=8)
ORACLE = HashOracle(64, [None])


@pytest.fixture(params=[False, True], ids=["sync", "ahead"])
def ahead(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def at_step(number: int, act: Callable[[], None]) -> Callable[[ModelBatch], None]:
    """For ``model.before``: act once, in the forward pass of this number from now."""
    seen = [0]

    def before(batch: ModelBatch) -> None:
        seen[0] += 1
        if seen[0] == number:
            act()

    return before


def interrupt() -> None:
    raise KeyboardInterrupt


def explode() -> None:
    raise RuntimeError("the device fell over")


def still_works(llm: LLM) -> None:
    assert_clean(llm)
    llm.engine.model.before = lambda batch: None  # type: ignore[attr-defined]
    prompts = [[3, 4], [5] * 9]
    assert ids_of(llm.generate(prompts, GREEDY)) == [ORACLE.tokens(p, 8) for p in prompts]
    assert_clean(llm)


# ---- Ctrl-C


@pytest.fixture(autouse=True)
def _default_interrupts() -> Iterator[None]:
    """A test runner may have a handler of its own; the engine then leaves interrupts to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_keyboard_interrupt_inside_a_step(toy_llm: Any, ahead: bool, step: int) -> None:
    llm = toy_llm("PrefixHash", scheduling__async_scheduling=ahead, scheduling__max_batch_tokens=7)
    llm.engine.model.before = at_step(step, interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[i] * (i + 1) for i in range(6)], GREEDY)
    still_works(llm)


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_sigint_during_a_step(toy_llm: Any, ahead: bool, step: int) -> None:
    llm = toy_llm("PrefixHash", scheduling__async_scheduling=ahead, scheduling__max_batch_tokens=7)
    llm.engine.model.before = at_step(step, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[i] * (i + 1) for i in range(6)], GREEDY)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    still_works(llm)


def test_interrupt_of_a_batch_leaves_a_stream_running(toy_llm: Any) -> None:
    llm = toy_llm("PrefixHash")
    stream = llm.stream([9, 9], SamplingParams(temperature=0, max_tokens=20))
    tokens = [token for _ in range(3) for token in next(stream).token_ids]
    llm.engine.model.before = at_step(3, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2]], GREEDY)
    tokens += [token for delta in stream for token in delta.token_ids]
    assert tokens == ORACLE.tokens([9, 9], 20)
    still_works(llm)


def test_interrupt_between_steps(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("PrefixHash", scheduling__async_scheduling=ahead)

    def before(batch: Any) -> None:
        if llm.engine.model.steps == 4:
            signal.raise_signal(signal.SIGINT)

    llm.engine.model.before = before
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2], [3]], [SamplingParams(temperature=0, max_tokens=n) for n in (3, 90)])
    still_works(llm)


def test_interrupt_while_cleaning_up_waits_for_it(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("PrefixHash", scheduling__async_scheduling=ahead)
    abort = llm.engine.core.abort

    def interrupted_abort(ids: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return abort(ids)

    stream = llm.stream([1, 2], SamplingParams(temperature=0, max_tokens=50))
    next(stream)
    llm.engine.core.abort = interrupted_abort
    with pytest.raises(KeyboardInterrupt):
        stream.close()
    llm.engine.core.abort = abort
    still_works(llm)


# ---- NaN


def nan_where(llm: LLM, token: int, value: float = float("nan")) -> None:
    """Rows of COUNT that would produce ``token`` get ``value`` in one place."""

    def after(logits: torch.Tensor) -> torch.Tensor:
        hit = logits[:, token] == logits.amax(dim=1)
        logits[hit, 7] = value
        return logits

    llm.engine.model.after = after  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_nan_row_ends_its_request_alone(toy_llm: Any, ahead: bool, value: float, temperature: float) -> None:
    llm = toy_llm("Count", scheduling__async_scheduling=ahead)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=8, logprobs=1)
    healthy = llm.generate([[10], [50]], params)
    nan_where(llm, 34, value)
    outputs = llm.generate([[10], [30], [50]], params)
    assert ends_of(outputs) == ["length", "error", "length"]
    assert outputs[1].error.code == "nan_logits"
    assert ids_of(outputs)[1] == [31, 32, 33]
    assert len(outputs[1].outputs[0].logprobs) == 3
    assert [outputs[0].outputs, outputs[2].outputs] == [healthy[0].outputs, healthy[1].outputs]
    assert_clean(llm)


def test_nan_in_the_padding_is_no_fault(toy_llm: Any) -> None:
    llm = toy_llm("Count", tokenizer=True)

    def after(logits: torch.Tensor) -> torch.Tensor:
        logits[:, 261:] = float("nan")
        return logits

    llm.engine.model.after = after
    assert ids_of(llm.generate([[5]], GREEDY)) == [count_tokens([5], 8, 320)]


def test_minus_infinity_is_a_legal_logit(toy_llm: Any) -> None:
    llm = toy_llm("Count")
    llm.engine.model.after = lambda logits: torch.where(logits > 0, logits, float("-inf"))
    (output,) = llm.generate([[5]], SamplingParams(seed=1, temperature=0.7, top_p=0.9, max_tokens=8, logprobs=2))
    assert output.outputs[0].token_ids == count_tokens([5], 8, 64)
    assert output.outputs[0].logprobs[0][6].logprob == 0.0


# ---- raising


@pytest.mark.parametrize("step", [1, 2, 4])
def test_raising_model_ends_the_requests_of_its_step(toy_llm: Any, ahead: bool, step: int) -> None:
    llm = toy_llm("PrefixHash", scheduling__async_scheduling=ahead, scheduling__max_running=2)
    llm.engine.model.before = at_step(step, explode)
    prompts = [[i + 1] for i in range(4)]
    outputs = llm.generate(prompts, GREEDY)
    assert ends_of(outputs) == ["error", "error", "length", "length"]
    for output in outputs[:2]:
        assert output.error.code == "internal"
        assert "the device fell over" in output.error.message
    assert ids_of(outputs)[2:] == [ORACLE.tokens(p, 8) for p in prompts[2:]]
    still_works(llm)


def test_results_before_a_fault_are_kept(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("PrefixHash", scheduling__async_scheduling=ahead)
    llm.engine.model.before = at_step(5, explode)
    outputs = llm.generate([[1], [2]], [SamplingParams(temperature=0, max_tokens=n) for n in (2, 20)])
    assert ends_of(outputs) == ["length", "error"]
    assert ids_of(outputs) == [ORACLE.tokens([1], 2), ORACLE.tokens([2], 4)]
    still_works(llm)


@pytest.mark.parametrize("method", ["order", "split", "victims", "on_event", "admit"])
def test_raising_policy_leaves_the_engine_clean(toy_llm: Any, ahead: bool, method: str) -> None:
    llm = toy_llm(
        "PrefixHash", scheduling__async_scheduling=ahead, kv_cache__num_blocks=8, scheduling__max_batch_tokens=6
    )

    def broken(*args: Any) -> None:
        raise ValueError("no idea")

    setattr(llm.engine.core.planner.policy, method, broken)
    prompts = [[i] * (i + 4) for i in range(4)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=15))
    assert ids_of(outputs) == [ORACLE.tokens(p, 15) for p in prompts]
    assert_clean(llm)
    delattr(llm.engine.core.planner.policy, method)
    still_works(llm)


@pytest.mark.parametrize("order", [[99, -1, 0, 0], [2, 1, 0], [], range(1000)])
@pytest.mark.parametrize("victims", [[99, -5], [0], [0, 0, 1], []])
@pytest.mark.parametrize("split", [(0, 0), (1, 0), (0, 1), (-3, 10**9), (10**9, 0)])
def test_nonsense_policy_cannot_harm(toy_llm: Any, ahead: bool, order: Any, victims: Any, split: Any) -> None:
    from deepinfer_core.api import TokenSplit

    llm = toy_llm(
        "PrefixHash",
        scheduling__async_scheduling=ahead,
        kv_cache__num_blocks=7,
        scheduling__max_batch_tokens=5,
        scheduling__max_running=3,
    )
    policy = llm.engine.core.planner.policy
    policy.order = lambda view, k: order
    policy.victims = lambda view, need: victims
    policy.split = lambda view: TokenSplit(*split)
    prompts = [[i] * (i + 3) for i in range(4)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=10))
    assert ids_of(outputs) == [ORACLE.tokens(p, 10) for p in prompts]
    assert_clean(llm)
