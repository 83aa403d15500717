"""A device whose memory is full when a step's results are read back: the step is lost, and no result changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from toys.checkpoints import ToyLLM
from toys.oracle import count_tokens

from deepinfer_core import LLM, SamplingParams


def greedy(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)


FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")


def fail_when(llm: LLM, fails: Callable[[int], bool], error: Exception = FULL) -> list[int]:
    """Read-backs whose number, from 1 on, ``fails`` raise; returns the numbers that did."""
    device: Any = llm.engine.core.runner.device
    plain, count, failed = device.download, 0, list[int]()

    def download(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        nonlocal count
        count += 1
        if fails(count):
            failed.append(count)
            raise error
        found: np.ndarray[Any, Any] = plain(tensor)
        return found

    device.download = download
    device.is_out_of_memory = lambda error: isinstance(error, torch.OutOfMemoryError)
    return failed


def check_clean(llm: LLM) -> None:
    planner = llm.engine.core.planner
    assert planner.cache.free_blocks == planner.cache.total_blocks
    assert not planner.slots.in_flight.any()
    assert not llm.engine.core.has_unfinished


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("numbers", [{1}, {1, 2, 3}, {2, 9, 10, 20}])
def test_steps_whose_tokens_do_not_arrive_are_run_again(toy_llm: ToyLLM, ahead: bool, numbers: set[int]) -> None:
    llm = toy_llm("Count", scheduling__async_scheduling=ahead)
    failed = fail_when(llm, lambda number: number in numbers)
    outputs = llm.generate([[i] * 9 for i in range(6)], greedy(20))
    assert [o.outputs[0].token_ids for o in outputs] == [count_tokens([i], 20, 64) for i in range(6)]
    assert failed == sorted(numbers)
    assert llm.engine.core.planner.budget == 64 >> len(numbers)
    check_clean(llm)


@pytest.mark.parametrize("ahead", [False, True])
def test_what_arrived_before_is_not_counted_twice(toy_llm: ToyLLM, ahead: bool) -> None:
    """Log-probabilities of prompts and tokens come in several parts, any of which may fail."""
    llm = toy_llm("PrefixHash", scheduling__async_scheduling=ahead)
    prompts = [[7 * i + j for j in range(20)] for i in range(2)]
    params = greedy(6, prompt_logprobs=2, logprobs=3)
    expected = llm.generate(prompts, params)
    failed = fail_when(llm, lambda number: number in (2, 11, 25, 38))
    found = llm.generate(prompts, params)
    assert failed == [2, 11, 25, 38]
    for got, want in zip(found, expected, strict=True):
        assert got.error is None
        assert got.prompt_logprobs == want.prompt_logprobs
        assert got.outputs[0].token_ids == want.outputs[0].token_ids
        assert got.outputs[0].logprobs == want.outputs[0].logprobs
    check_clean(llm)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("error", "code"), [(FULL, "out_of_memory"), (RuntimeError("broken copy"), "internal")])
def test_results_that_never_arrive_end_their_requests_and_not_the_engine(
    toy_llm: ToyLLM, ahead: bool, error: Exception, code: str
) -> None:
    llm, broken = toy_llm("Count", scheduling__async_scheduling=ahead), True
    failed = fail_when(llm, lambda _: broken, error)
    outputs = llm.generate([[1, 2, 3], [4, 5]], greedy(4))
    assert failed
    for output in outputs:
        assert output.error is not None
        assert output.error.code == code
        assert str(error) in output.error.message
    check_clean(llm)
    broken = False
    assert llm.generate([[1, 2, 3]], greedy(4))[0].outputs[0].token_ids == count_tokens([3], 4, 64)
