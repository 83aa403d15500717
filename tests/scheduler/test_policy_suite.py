"""The invariant suite passes the good policies and names what is wrong with the broken ones."""

from __future__ import annotations

import numpy as np
import pytest
from broken_policies import BROKEN
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_core.cli import main
from deepinfer_core.conformance.policy import CHECKS, check_policy, check_view, policy_factory
from deepinfer_core.conformance.policy_views import random_view

POLICIES = ("fcfs", "priority", "deadline", "fair", "cache_aware", "shortest_first", "latency", "throughput")


@pytest.mark.parametrize("name", POLICIES)
def test_good_policies_pass(name: str) -> None:
    report = check_policy(name)
    assert report.findings == ()
    assert report.passed
    assert sorted(report.call_seconds) == ["admit", "order", "split", "victims"]


@pytest.mark.parametrize("policy", BROKEN, ids=lambda policy: policy.__name__)
def test_broken_policies_are_caught_and_nothing_else_is_said_of_them(policy: type) -> None:
    """But that an answer which makes no sense makes none in the simulator either, and that a lottery may starve."""
    found = {finding.check for finding in check_policy(policy, views=30).findings}
    assert found <= set(CHECKS)
    assert BROKEN[policy] in found
    assert found <= {BROKEN[policy], "raises", *(["starves"] if policy.__name__ == "Random" else [])}


@given(
    seed=st.integers(0, 2**32),
    waiting=st.integers(0, 60) | st.just(3000),
    running=st.integers(0, 40),
    now=st.floats(0, 1e6),
    rounds=st.integers(1, 3),
    name=st.sampled_from(POLICIES),
)
@settings(max_examples=150)
def test_any_view_gets_a_right_answer(
    seed: int, waiting: int, running: int, now: float, rounds: int, name: str
) -> None:
    make, random = policy_factory(name), np.random.default_rng(seed)
    policy, twin = make(), make()
    for _ in range(rounds):
        view = random_view(random, waiting=waiting, running=running, now=now)
        assert list(check_view(policy, twin, view, random)) == []


@pytest.mark.parametrize(
    ("target", "code"), [("broken_policies:Duplicates", 1), ("priority", 0), ("scheduler:fair", 0)]
)
def test_as_a_command(target: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--policy", target]) == code
    assert ("FAILED policy/order" in capsys.readouterr().err) is bool(code)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nowhere:Policy", "No module named 'nowhere'"),
        ("broken_policies:Nobody", "has no attribute 'Nobody'"),
        ("nobody", "no loaded plugin has policy 'nobody'"),
    ],
)
def test_a_policy_that_is_not_there_is_one_line(target: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--policy", target]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
