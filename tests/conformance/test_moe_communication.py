"""Experts on several processes: the reference passes, every mistake fails its case, and a lost process is told."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import attrs
import broken_exchange
import pytest

from deepinfer_core.conformance import ranks
from deepinfer_core.conformance.kit import ask, select
from deepinfer_core.conformance.operators import expert_parallel
from deepinfer_core.conformance.ranks import RankLost, Ranks
from deepinfer_core.conformance.target import Target, open_target

CASES = {case.id: case for case in select("full", ["moe_communication"], "float32")}
PLUGIN = "broken_exchange"
HANGS = "idle_rank_stays_away"
LOSES = (HANGS, "process_ends", "process_raises")
"""A process is lost with these, and the group starts again: they come last."""


@pytest.fixture(scope="module")
def opened() -> Iterator[Target]:
    """One group of two processes for all mistakes, started again only where one of them is lost."""
    target = open_target(broken_exchange.BACKEND, [PLUGIN])
    yield target
    target.close()


@pytest.mark.parametrize("case", sorted({case for case, _, _ in broken_exchange.MISTAKES.values()}))
def test_the_reference_passes(case: str, opened: Target) -> None:
    """The very same cases: one that fails whatever it is asked proves nothing."""
    result = ask(CASES[case], opened)
    assert (result.outcome, result.message) == ("passed", "reference:all_to_all")


@pytest.mark.parametrize("name", sorted(broken_exchange.MISTAKES, key=lambda name: (name in LOSES, name)))
def test_the_mistake_fails_its_case(name: str, opened: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == HANGS:
        monkeypatch.setattr(ranks, "TIMEOUT", 10.0)
        group = opened.facts.pop("ranks", None)  # it was started with the longer time
        if group is not None:
            group.close()
    case, says, _ = broken_exchange.MISTAKES[name]
    result = ask(CASES[case], attrs.evolve(opened, wanted=[f"{broken_exchange.BACKEND}:{name}"]))
    assert result.outcome == "failed", result
    assert says in result.message
    assert "moe.expert_parallel" in result.message
    assert "expected" in result.message or "raised" in result.message


def test_a_backend_with_a_local_exchange_only_is_told_so() -> None:
    target = open_target("reference")
    alone = attrs.evolve(target, fallback="error", backend="acme", plugin="acme")
    result = ask(CASES["moe_communication[2]/float32/round_trip"], alone)
    target.close()
    assert result.outcome == "refused"
    assert result.message.startswith("serves one process")


def test_a_device_that_joins_by_itself_is_held_to_its_rank() -> None:
    target = open_target(broken_exchange.JOINS_WRONGLY, [PLUGIN])
    result = ask(CASES["moe_communication[2]/float32/round_trip"], target)
    target.close()
    assert result.outcome == "failed"
    assert "join() gave rank 1 of 2, expected 0 of 2" in result.message


def joined(rank: int, size: int, init_method: str, timeout: float) -> int:
    return rank


def slept(rank: int, seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def test_who_does_not_come_back_is_named() -> None:
    group = Ranks(2, f"{__name__}:joined", timeout=2.0)
    assert group.ask(f"{__name__}:slept", [(0.0,), (0.0,)]) == [0.0, 0.0]
    with pytest.raises(RankLost, match=r"rank 1 of 2 did not come back from slept within 2 s, rank 0 did"):
        group.ask(f"{__name__}:slept", [(0.0,), (600.0,)])
    assert not group.alive


def refused(*_: Any) -> None:
    raise OSError("no such device")


def test_who_does_not_join_is_named() -> None:
    with pytest.raises(RankLost, match=r"rank 0 of 1 raised OSError: no such device"):
        Ranks(1, f"{__name__}:refused")


def test_unequal_numbers_of_rows_and_a_rank_with_none() -> None:
    assert [expert_parallel.spread(12, size) for size in expert_parallel.SIZES] == [[12], [12, 6], [12, 6, 0, 3]]
