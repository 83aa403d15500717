"""The worked vector of ``deepinfer_core.api.sampling``: every stage's result, and what other orders would give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_support import batch, kept, stage

from deepinfer_core.api import STAGES

INF = float("inf")
LOGITS = [2.0, 1.0, 0.0, 9.0]
ROW: dict[str, Any] = {
    "output": [2, 2],
    "allowed": [0, 1, 2],
    "bias": {2: 3.0},
    "frequency": 1.0,
    "repetition": 2.0,
    "temperature": 0.5,
    "min_p": 0.05,
    "top_k": 3,
    "top_p": 0.88,
}
FILTERS = STAGES[:-1]
STEPS = {
    "mask": [2.0, 1.0, 0.0, -INF],
    "bias": [2.0, 1.0, 3.0, -INF],
    "penalties": [2.0, 1.0, -0.5, -INF],
    "temperature": [0.0, -2.0, -5.0, -INF],
    "min_p": [0.0, -2.0, -INF, -INF],
    "top_k": [0.0, -2.0, -INF, -INF],
    "top_p": [0.0, -INF, -INF, -INF],
}


def process(order: tuple[str, ...], row: dict[str, Any] = ROW) -> torch.Tensor:
    logits = torch.tensor([LOGITS])
    for name in order:
        logits = stage(name, 4).run(logits, batch([row], 4))
    return logits


def moved(order: tuple[str, ...], name: str, behind: str) -> tuple[str, ...]:
    rest = [other for other in order if other != name]
    rest.insert(rest.index(behind) + 1, name)
    return tuple(rest)


@pytest.mark.parametrize("name", FILTERS)
def test_each_step_of_the_worked_vector(name: str) -> None:
    until = FILTERS[: FILTERS.index(name) + 1]
    assert process(until).tolist() == [STEPS[name]]


@pytest.mark.parametrize(
    ("name", "behind"),
    [
        ("mask", "temperature"),
        ("mask", "min_p"),
        ("bias", "penalties"),
        ("penalties", "temperature"),
        ("temperature", "min_p"),
        ("min_p", "top_p"),
    ],
)
def test_another_order_gives_other_logits(name: str, behind: str) -> None:
    assert not torch.equal(process(moved(FILTERS, name, behind)), process(FILTERS))


def test_repetition_comes_before_frequency() -> None:
    # The other way round: 3 - 2 * 1.0 = 1, then 1 / 2 = 0.5.
    assert process(("mask", "bias", "penalties"))[0, 2] == -0.5


def test_min_p_after_top_p_leaves_another_survivor() -> None:
    assert kept(process(FILTERS)) == [[0]]
    assert kept(process(moved(FILTERS, "min_p", "top_p"))) == [[0, 1]]


def test_top_k_after_top_p_leaves_another_survivor() -> None:
    row = {**ROW, "min_p": 0.0, "top_k": 2}
    assert kept(process(FILTERS, row)) == [[0]]
    assert kept(process(moved(FILTERS, "top_k", "top_p"), row)) == [[0, 1]]
