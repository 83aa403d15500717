"""Budgets and allocations against brute force, and the numbers of case A02."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from deepinfer_spec_decode.budget import allocate, early_stop_budget, global_budget, throughput, usable
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_core.engine.speculation_plan import survival

Array = np.ndarray[Any, Any]
R1, R2 = [0.9, 0.8, 0.5], [0.6, 0.9, 0.9]
CAPS = np.array([3, 3])


def steps(table: dict[int, float]) -> Any:
    """A cost function from a table; other sizes cannot run."""
    return lambda rows: np.array([table.get(int(r), np.inf) for r in rows])


def test_survival_is_the_running_product() -> None:
    found = survival(np.array([R1, R2]))
    assert found == pytest.approx(np.array([[0.9, 0.72, 0.36], [0.6, 0.54, 0.486]]))


def test_case_a02_lengths() -> None:
    chances = survival(np.array([R1, R2]))
    found = [tuple(allocate(chances, CAPS, total).tolist()) for total in range(7)]
    assert found == [(0, 0), (1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (3, 3)]


def test_case_a02_budget() -> None:
    """Budget 1 is worse than 0 and 4 the best: a search that stops at the first descent is wrong."""
    chances = survival(np.array([R1, R2]))
    costs = steps({2: 1.0, 3: 1.5, 4: 1.5, 5: 1.5, 6: 1.5, 7: 2.4, 8: 2.4})
    rates = throughput(chances, CAPS, 2, costs)
    assert rates[[0, 1, 4]] == pytest.approx([2.0, 1.933, 3.173], abs=1e-3)
    assert global_budget(chances, CAPS, 2, costs) == 4
    assert early_stop_budget(chances, CAPS, 2, costs) == 0


def test_worked_examples() -> None:
    """Appendix A of the paper, and two requests."""
    costs = steps({1: 1.0, 2: 2.0, 3: 1 / 0.45})
    assert 1 + global_budget(np.array([[0.8, 0.72]]), np.array([2]), 1, costs) == 3
    assert 1 + early_stop_budget(np.array([[0.8, 0.72]]), np.array([2]), 1, costs) == 1
    assert 1 + global_budget(np.array([[0.8, 0.0]]), np.array([2]), 1, costs) == 1
    chances = np.array([[0.9, 0.8, 0.5], [0.6, 0.3, 0.1]])
    jagged = {2: 10.0, 3: 10.5, 4: 10.5, 5: 14.0, 6: 14.0, 7: 14.0, 8: 14.0}
    assert 2 + global_budget(chances, CAPS, 2, steps(jagged)) == 8


def test_the_largest_graph_bounds_the_budget() -> None:
    chances = np.ones((2, 5))
    assert global_budget(chances, np.array([5, 5]), 2, steps({2: 1.0, 3: 1.0, 4: 1.0})) == 2


def test_ties_are_settled_and_closed_under_prefixes() -> None:
    for total in range(13):
        counts = allocate(np.ones((3, 4)), np.array([4, 4, 4]), total)
        assert counts.tolist() == [min(4, total), min(4, max(0, total - 4)), max(0, total - 8)]


def test_of_equal_budgets_the_smallest_is_taken() -> None:
    """Certain drafts at the price of their rows bring nothing: verifying none is as good as any number."""
    for rows in (1, 2):
        found = global_budget(np.ones((rows, 4)), np.full(rows, 4), rows, lambda m: np.asarray(m, np.float64))
        assert found == early_stop_budget(np.ones((rows, 4)), np.full(rows, 4), rows, lambda m: 2.0 * m) == 0


def test_survival_that_rises_is_held_down_and_caps_are_kept() -> None:
    assert usable(np.array([[0.2, 0.9, 0.1]]), np.array([3])).tolist() == [[0.2, 0.2, 0.1]]
    assert allocate(np.ones((2, 4)), np.array([1, 3]), 100).tolist() == [1, 3]


def test_zero_and_nan_rows_do_no_harm() -> None:
    chances = np.array([[0.9, 0.5], [np.nan, np.nan], [0.0, 0.0], [np.inf, -1.0]])
    caps = np.array([2, 2, 2, 2])
    assert allocate(chances, caps, 3).tolist() == [2, 0, 0, 1]
    assert global_budget(chances, caps, 4, lambda rows: np.ones(len(rows))) == 3
    assert (survival(np.array([[np.nan, 1.0], [0.5, np.nan], [2.0, -3.0]])) == [[0, 0], [0.5, 0], [1, 0]]).all()


def brute(chances: Array, caps: Array, rows: int, costs: Any) -> float:
    """The best throughput over every choice of lengths."""
    best = -1.0
    alive = [int((row[:cap] > 0).sum()) for row, cap in zip(chances, caps, strict=True)]  # others cannot be accepted
    for lengths in itertools.product(*(range(cap + 1) for cap in alive)):
        gained = sum(chances[r, :length].sum() for r, length in enumerate(lengths))
        best = max(best, (rows + gained) / float(costs(np.array([rows + sum(lengths)]))[0]))
    return best


tables = st.lists(st.floats(0.5, 4.0), min_size=12, max_size=12)


@settings(max_examples=150)
@given(seed=st.integers(0, 10**6), costs=tables)
def test_budget_and_allocation_by_brute_force(seed: int, costs: list[float]) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 4))
    chances = np.cumprod(rng.choice([0.0, 0.3, 0.7, 1.0, rng.random()], (rows, 3)), axis=1)
    caps = rng.integers(0, 4, rows)

    def cost(count: Array) -> Array:
        return np.array([costs[int(c) - 1] for c in count])

    total = global_budget(chances, caps, rows, cost)
    counts = allocate(chances, caps, total)
    assert counts.sum() == total
    assert (counts <= caps).all()
    gained = sum(chances[r, : counts[r]].sum() for r in range(rows))
    assert (rows + gained) / cost(np.array([rows + total]))[0] == pytest.approx(brute(chances, caps, rows, cost))


@settings(max_examples=150)
@given(seed=st.integers(0, 10**6), costs=tables)
def test_early_stop_is_the_first_that_does_not_improve(seed: int, costs: list[float]) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 4))
    chances = np.cumprod(rng.random((rows, 3)), axis=1)
    caps = rng.integers(0, 4, rows)
    flat = sorted((chances[r, j] for r in range(rows) for j in range(caps[r])), reverse=True)
    expected, budget = float(rows), 0
    while budget < len(flat):
        better = (expected + flat[budget]) / costs[rows + budget] > expected / costs[rows + budget - 1]
        if not better:
            break
        expected += flat[budget]
        budget += 1

    def cost(count: Array) -> Array:
        return np.array([costs[int(c) - 1] for c in count])

    assert early_stop_budget(chances, caps, rows, cost) == budget


def test_early_stop_does_not_look_at_later_drafts() -> None:
    """Whether k drafts are verified may not depend on what comes after them."""
    rng = random.Random(2)
    for _ in range(200):
        chances = np.cumprod([[rng.random() for _ in range(4)]], axis=1)
        costs = np.cumsum([1.0] + [rng.random() / 2 for _ in range(4)])
        budget = early_stop_budget(chances, np.array([4]), 1, lambda rows: costs[rows - 1])  # noqa: B023
        changed = chances.copy()
        changed[0, budget + 1 :] *= rng.random()
        assert early_stop_budget(changed, np.array([4]), 1, lambda rows: costs[rows - 1]) == budget  # noqa: B023
