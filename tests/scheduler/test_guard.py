"""A policy that fails costs that step its preferences, one log record and a count; no request is lost."""

from __future__ import annotations

from typing import Any

import pytest
import structlog
from broken_policies import BROKEN
from toys.checkpoints import ToyLLM
from toys.checks import assert_clean, ids_of
from toys.oracle import HashOracle

from deepinfer_core import SamplingParams
from deepinfer_core.api import Admit, SystemView, TokenSplit
from deepinfer_core.engine.fcfs import FirstComeFirstServed
from deepinfer_core.engine.policy_guard import EVERY_RECORD, PolicyGuard

ORACLE = HashOracle(64, [None])
PROMPTS = [[i] * (i % 5 + 3) for i in range(12)]


@pytest.mark.parametrize("policy", [p for p, check in BROKEN.items() if check not in ("drops", "admit", "slow")])
def test_nothing_is_lost_and_tokens_are_the_same(toy_llm: ToyLLM, policy: type[Any]) -> None:
    llm: Any = toy_llm("PrefixHash", kv_cache__num_blocks=10, scheduling__max_batch_tokens=6, scheduling__max_running=4)
    planner = llm.engine.core.planner
    planner.policy = planner.guard.policy = policy()
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=10))
    assert ids_of(outputs) == [ORACLE.tokens(p, 10) for p in PROMPTS]
    assert_clean(llm)


class Moody(FirstComeFirstServed):
    """Raises in the steps it is told to, counting the questions."""

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad
        self.asked: list[tuple[str, int]] = []

    def _answer(self, question: str, view: SystemView) -> None:
        self.asked.append((question, view.step))
        if view.step in self.bad:
            raise RuntimeError("not today")

    def order(self, view: SystemView, k: int) -> Any:
        self._answer("order", view)
        return list(range(len(view.waiting.ids)))[::-1][:k]

    def split(self, view: SystemView) -> TokenSplit:
        self._answer("split", view)
        return super().split(view)


def test_only_the_step_in_which_it_fails_is_first_come_first_served(toy_llm: ToyLLM) -> None:
    llm: Any = toy_llm("PrefixHash", scheduling__max_running=1)
    policy = Moody({1})
    planner = llm.engine.core.planner
    planner.policy = planner.guard.policy = policy
    with structlog.testing.capture_logs() as logs:
        outputs = llm.generate([[i] * 4 for i in range(4)], SamplingParams(temperature=0, max_tokens=3))
    starts = [output.metrics.first_scheduled for output in outputs]
    assert sorted(range(4), key=lambda i: starts[i]) == [0, 3, 2, 1]
    failed = [entry for entry in logs if entry["event"].startswith("scheduling policy failed")]
    assert [(entry["question"], entry["step"], entry["failures"]) for entry in failed] == [("order", 1, 1)]
    assert planner.guard.failures == 1


def test_a_step_costs_one_failure_however_many_questions_it_has(toy_llm: ToyLLM) -> None:
    """split fails, and order is not asked in that step."""
    llm: Any = toy_llm("PrefixHash", scheduling__max_running=2)
    policy = Moody(set(range(2, 1000)))
    planner = llm.engine.core.planner
    planner.policy = planner.guard.policy = policy
    llm.generate([[i] * 4 for i in range(6)], SamplingParams(temperature=0, max_tokens=5))
    steps = [step for _, step in policy.asked if step >= 2]
    assert len(steps) == len(set(steps)) == planner.guard.failures


def test_it_is_counted_as_a_metric(toy_llm: ToyLLM) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    llm: Any = toy_llm("PrefixHash", logging__metrics=["prometheus"], scheduling__policy="priority")
    planner = llm.engine.core.planner
    planner.guard.policy = Moody({1})
    llm.generate([[1], [2]], SamplingParams(temperature=0, max_tokens=3))
    counted = {
        sample.labels["plugin"]: sample.value
        for family in text_string_to_metric_families(llm.metrics_text())
        for sample in family.samples
        if sample.name == "deepinfer_plugin_errors_total"
    }
    assert counted["scheduler"] == 1


def test_a_policy_that_always_fails_fills_no_disk() -> None:
    guard = PolicyGuard(Moody(set()), view=lambda: 1 / 0, step=lambda: next(steps))  # type: ignore[arg-type, return-value]
    steps = iter(range(10**6))
    with structlog.testing.capture_logs() as logs:
        for _ in range(1000):
            assert guard.split(TokenSplit(5, 5)) == TokenSplit(5, 5)
    assert guard.failures == 1000
    assert len(logs) == EVERY_RECORD + 5  # 32, 64, 128, 256, 512


@pytest.mark.parametrize(
    "answer",
    [None, True, Admit, (1, 2), TokenSplit(-1, 5), TokenSplit(1.5, 2)],
    ids=repr,  # type: ignore[arg-type]
)
def test_nonsense_splits_are_failures(answer: Any) -> None:
    policy: Any = FirstComeFirstServed()
    policy.split = lambda view: answer
    guard = PolicyGuard(policy, view=lambda: None, step=lambda: 1)  # type: ignore[arg-type, return-value]
    with structlog.testing.capture_logs():
        assert guard.split(TokenSplit(7, 7)) == TokenSplit(7, 7)
    assert guard.failures == 1


def test_a_wrong_admit_admits() -> None:
    class Silent(FirstComeFirstServed):
        def admit(self, request: Any, view: Any) -> Any:
            return None

    class Arrived:
        request_id = tenant = ""
        priority, deadline, ttft_target, tpot_target, max_len = 0, None, None, None, 2
        prompt_token_ids = (1,)

        class metrics:
            arrival = 0.0

    guard = PolicyGuard(Silent(), view=lambda: None, step=lambda: 1)  # type: ignore[arg-type, return-value]
    with structlog.testing.capture_logs() as logs:
        assert guard.admit(Arrived()) == Admit(True)  # type: ignore[arg-type]
    assert [entry["question"] for entry in logs] == ["admit"]
