"""Sampling stages that plugins add: asked for per request, placed by name, contained when they fail."""

from __future__ import annotations

from typing import Any

import pytest
from toys.checkpoints import ToyLLM

from deepinfer_core import SamplingParams
from deepinfer_core.api import InvalidRequestError, PlanError, StageArgument, StageInfo
from deepinfer_core.engine.sampler import stage_order

PLUGINS = ["toys.plugin", "toys.stage_plugin"]


def greedy(bound: float | None = None, **more: Any) -> SamplingParams:
    extra = None if bound is None else {"ban_below": bound}
    return SamplingParams(temperature=0, max_tokens=2, extra_args=extra, **more)


def test_only_requests_that_ask_are_touched(toy_llm: ToyLLM) -> None:
    llm = toy_llm("Const", plugins__paths=PLUGINS)
    outputs = llm.generate([[1], [1], [1]], [greedy(), greedy(4), greedy(6)])
    assert [o.outputs[0].token_ids for o in outputs] == [[3, 3], [5, 5], [7, 7]]


def test_it_runs_where_it_says(toy_llm: ToyLLM) -> None:
    """After penalties and before temperature: processed log-probabilities see it, raw ones do not."""
    llm = toy_llm("Const", plugins__paths=PLUGINS)
    (raw,) = llm.generate([[1]], greedy(4, logprobs=1))
    (processed,) = llm.generate([[1]], greedy(4, logprobs=1, logprobs_mode="processed"))
    assert raw.outputs[0].logprobs is not None
    assert processed.outputs[0].logprobs is not None
    assert next(iter(raw.outputs[0].logprobs[0])) == 3
    assert next(iter(processed.outputs[0].logprobs[0])) == 5


def test_explain_lists_it(toy_llm: ToyLLM) -> None:
    llm = toy_llm("Const", plugins__paths=PLUGINS)
    rows = {row["slot"]: row for row in llm.explain()["rows"]}
    assert rows["sampling_ban_below"]["provider"] == "stage_plugin:ban_below"


@pytest.mark.parametrize("ahead", [False, "auto"])
def test_a_built_in_stage_is_replaced(toy_llm: ToyLLM, ahead: Any) -> None:
    """The plugin's bias counts twice: 1.9 + 0.08 is below 2.0, 1.9 + 2 · 0.08 is above."""
    params = [greedy(logit_bias={5: 0.08}), greedy(), greedy(4, logit_bias={5: -1.0})]
    own = toy_llm("Const", scheduling__async_scheduling=ahead)
    theirs = toy_llm("Const", plugins__paths=PLUGINS, scheduling__async_scheduling=ahead)
    assert [o.outputs[0].token_ids for o in own.generate([[1]] * 2, params[:2])] == [[3, 3], [3, 3]]
    assert [o.outputs[0].token_ids for o in theirs.generate([[1]] * 3, params)] == [[5, 5], [3, 3], [7, 7]]
    rows = {row["slot"]: row for row in theirs.explain()["rows"]}
    assert rows["sampling_bias"]["provider"] == "stage_plugin:double_bias"
    assert rows["sampling_penalties"]["provider"] != "stage_plugin:double_bias"


def test_one_that_raises_ends_the_request_that_made_it(toy_llm: ToyLLM) -> None:
    llm = toy_llm("Const", plugins__paths=PLUGINS)
    fine, broken, other = llm.generate([[1], [1], [2]], [greedy(4, logprobs=1), greedy(13), greedy()])
    assert broken.error is not None
    assert broken.error.code == "internal"
    assert "thirteen" in broken.error.message
    assert fine.outputs[0].token_ids == [5, 5]
    assert fine.outputs[0].logprobs is not None
    assert fine.outputs[0].logprobs[0][5].rank == 2
    assert other.outputs[0].token_ids == [3, 3]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"ban_belwo": 1}, "no sampling stage has this argument"),
        ({"ban_below": 65}, r"expected a number in \[0.0, 64.0\]"),
    ],
)
def test_arguments_are_checked(toy_llm: ToyLLM, extra: dict[str, float], message: str) -> None:
    llm = toy_llm("Const", plugins__paths=PLUGINS)
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate([[1]], SamplingParams(extra_args=extra))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", True])
def test_arguments_are_finite_numbers(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="extra_args"):
        SamplingParams(extra_args={"ban_below": value})


def test_told_to_run_ahead_with_a_host_bound_stage_is_refused(toy_llm: ToyLLM) -> None:
    with pytest.raises(PlanError, match=r"sampling_ban_below.*lacks: device_state"):
        toy_llm("Const", plugins__paths=PLUGINS, scheduling__async_scheduling=True)


def test_why_the_loop_is_synchronous_is_shown(toy_llm: ToyLLM) -> None:
    assert toy_llm("Const").explain()["facts"]["loop"].startswith("synchronous: this device shares")
    assert toy_llm("Const", scheduling__async_scheduling=True).explain()["facts"]["loop"] == "one step ahead"


def test_order_follows_places_then_names() -> None:
    argument = {"x": StageArgument(off=0, low=0, high=1)}
    extra = [
        StageInfo(name=n, after=after, arguments=argument)
        for n, after in (("b", "bias"), ("c", "top_p"), ("a", "bias"))
    ]
    order = stage_order(extra)
    assert order == ("mask", "bias", "a", "b", "penalties", "temperature", "min_p", "top_k", "top_p", "c", "draw")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "top_k"}, "no built-in stage"),
        ({"name": "not-a-name"}, "expected an identifier"),
        ({"after": "draw"}, "after='draw'"),
        ({"after": "nowhere"}, "after='nowhere'"),
        ({"arguments": {}}, "at least one argument"),
    ],
)
def test_declarations_are_checked(fields: dict[str, Any], message: str) -> None:
    given = {"name": "x", "after": "bias", "arguments": {"x": StageArgument(off=0, low=0, high=1)}, **fields}
    with pytest.raises(ValueError, match=message):
        StageInfo(**given)
