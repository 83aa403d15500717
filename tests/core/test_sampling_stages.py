"""Bias, penalties, temperature, min_p, top_k and top_p of the reference backend, against plain Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_support import batch, kept, stage

V = 11
INF = float("inf")


def run(name: str, logits: list[list[float]], rows: list[dict[str, Any]]) -> torch.Tensor:
    tensor = torch.tensor(logits, dtype=torch.float32)
    result: torch.Tensor = stage(name, tensor.shape[1]).run(tensor, batch(rows, tensor.shape[1]))
    return result


def best_first(logits: list[float]) -> list[int]:
    return sorted(range(len(logits)), key=lambda token: (-logits[token], token))


# Few distinct values, so that ties are common.
tied = st.lists(st.sampled_from([-2.0, -0.0, 0.0, 0.5, 1.0, 3.0, -INF]), min_size=V, max_size=V).filter(
    lambda row: max(row) > -INF
)
spread = st.lists(st.floats(-8, 8, width=32), min_size=V, max_size=V)


def test_bias_is_added_to_its_ids() -> None:
    result = run("bias", [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]], [{"bias": {0: -2.5, 2: 10.0}}, {"bias": {1: 1.0}}])
    assert result.tolist() == [[-1.5, 2.0, 13.0], [1.0, 3.0, 3.0]]


def test_bias_cannot_bring_back_a_masked_token() -> None:
    assert run("bias", [[1.0, -INF]], [{"bias": {1: 1e30}}]).tolist() == [[1.0, -INF]]


def test_bias_outside_the_vocabulary_is_ignored() -> None:
    assert run("bias", [[1.0, 2.0]], [{"bias": {7: 5.0}}]).tolist() == [[1.0, 2.0]]


def expected_penalties(logits: list[float], row: dict[str, Any]) -> list[float]:
    past = [*row.get("prompt", []), *row.get("output", [])][: row.get("position", 10**9)]
    output = past[len(row.get("prompt", [])) :]
    f32 = np.float32
    result = []
    for token, logit in enumerate(logits):
        value = f32(logit)
        if token in past:
            repetition = f32(row.get("repetition", 1.0))
            value = value / repetition if value > 0 else value * repetition
        value = value - f32(row.get("frequency", 0.0)) * f32(output.count(token))
        value = value - f32(row.get("presence", 0.0)) * f32(token in output)
        result.append(float(value))
    return result


def test_repetition_looks_at_prompt_and_output() -> None:
    row = {"prompt": [0, 1], "output": [2], "repetition": 2.0}
    assert run("penalties", [[4.0, -4.0, 1.0, 4.0]], [row]).tolist() == [[2.0, -8.0, 0.5, 4.0]]


def test_frequency_and_presence_look_at_the_output_only() -> None:
    row = {"prompt": [0, 0, 1], "output": [1, 1, 2], "frequency": 0.5, "presence": 0.25}
    assert run("penalties", [[0.0, 0.0, 0.0, 0.0]], [row]).tolist() == [[0.0, -1.25, -0.75, 0.0]]


def test_negative_penalties_reward() -> None:
    row = {"prompt": [0], "output": [1], "frequency": -1.0, "repetition": 0.5}
    assert run("penalties", [[2.0, 2.0, 2.0]], [row]).tolist() == [[4.0, 5.0, 2.0]]


def test_penalties_leave_a_masked_token_masked() -> None:
    row = {"prompt": [0], "output": [0], "frequency": -2.0, "repetition": 1.5}
    assert run("penalties", [[-INF, 1.0]], [row]).tolist() == [[-INF, 1.0]]


def test_tokens_at_and_after_the_position_do_not_count() -> None:
    row = {"prompt": [0], "output": [1, 2, 2], "frequency": 1.0, "repetition": 2.0, "position": 2}
    assert run("penalties", [[1.0, 1.0, 1.0]], [row]).tolist() == [[0.5, -0.5, 1.0]]


def test_rows_of_one_slot_count_up_to_their_own_position() -> None:
    row = {"prompt": [3], "output": [1, 2, 1], "frequency": 1.0, "presence": 0.5, "repetition": 1.25}
    logits = torch.linspace(-1, 1, 3 * V).reshape(3, V)
    shared = batch([row], V, slots=torch.zeros(3, dtype=torch.int64), positions=torch.tensor([1, 2, 4]), max_position=4)
    result = stage("penalties", V).run(logits, shared)
    expected = [expected_penalties(logits[i].tolist(), {**row, "position": p}) for i, p in enumerate((1, 2, 4))]
    assert result.tolist() == expected


penalty_row = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, V - 1), min_size=1, max_size=5),
        "output": st.lists(st.integers(0, V - 1), max_size=5),
        "repetition": st.sampled_from([1.0, 1.3, 0.7]),
        "frequency": st.sampled_from([0.0, 0.4, -1.1]),
        "presence": st.sampled_from([0.0, 0.9, -0.3]),
    }
)


@settings(max_examples=50)
@given(st.lists(st.tuples(spread, penalty_row), min_size=1, max_size=4))
def test_penalties_equal_plain_float32_python(pairs: list[tuple[list[float], dict[str, Any]]]) -> None:
    result = run("penalties", [logits for logits, _ in pairs], [row for _, row in pairs])
    assert result.tolist() == [expected_penalties(logits, row) for logits, row in pairs]


def test_temperature_divides_the_distance_to_the_maximum() -> None:
    result = run("temperature", [[1.0, 3.0, -1.0]], [{"temperature": 0.5}])
    assert result.tolist() == [[-4.0, 0.0, -8.0]]


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 9.9e-6, 1.0])
def test_greedy_rows_and_temperature_one_are_unchanged(temperature: float) -> None:
    logits = [[0.1, 7.5, -INF]]
    assert torch.equal(run("temperature", logits, [{"temperature": temperature}]), torch.tensor(logits))


def test_temperature_keeps_masked_tokens_masked() -> None:
    assert run("temperature", [[0.0, -INF]], [{"temperature": 2.0}]).tolist() == [[0.0, -INF]]


@settings(max_examples=50)
@given(st.lists(st.tuples(spread, st.floats(2**-13, 100, width=32)), min_size=1, max_size=4))
def test_temperature_gives_the_softmax_of_the_quotient(pairs: list[tuple[list[float], float]]) -> None:
    result = run("temperature", [logits for logits, _ in pairs], [{"temperature": t} for _, t in pairs])
    for row, (logits, temperature) in zip(result, pairs, strict=True):
        exact = torch.softmax(torch.tensor(logits, dtype=torch.float64) / temperature, dim=0)
        torch.testing.assert_close(row.double().softmax(0), exact, rtol=2e-2, atol=1e-6)


def test_min_p_is_relative_to_the_likeliest() -> None:
    logits = [[math.log(p) for p in (0.5, 0.26, 0.24)]]
    assert kept(run("min_p", logits, [{"min_p": 0.5}])) == [[0, 1]]


def test_min_p_one_keeps_only_the_best() -> None:
    # The second is one float32 step below the others.
    assert kept(run("min_p", [[2.0, 1.9999999, 2.0, 1.0]], [{"min_p": 1.0}])) == [[0, 2]]


@settings(max_examples=50)
@given(st.lists(st.tuples(spread, st.floats(0, 1, width=32)), min_size=1, max_size=4))
def test_min_p_equals_plain_python(pairs: list[tuple[list[float], float]]) -> None:
    result = kept(run("min_p", [logits for logits, _ in pairs], [{"min_p": p} for _, p in pairs]))
    for ids, (logits, min_p) in zip(result, pairs, strict=True):
        for token, logit in enumerate(logits):
            ratio = math.exp(logit - max(logits))
            if abs(ratio - min_p) > 1e-5 * min_p:  # closer than float32 can tell: either answer is right
                assert (token in ids) == (ratio >= min_p)


@pytest.mark.parametrize("top_k", [0, -1, V, V + 1, 10**6])
def test_top_k_off(top_k: int) -> None:
    logits = [[float(token) for token in range(V)]]
    assert torch.equal(run("top_k", logits, [{"top_k": top_k}]), torch.tensor(logits))


def test_top_k_keeps_exactly_k_of_equals_lowest_ids_first() -> None:
    assert kept(run("top_k", [[1.0, 2.0, 1.0, 1.0, 0.0]], [{"top_k": 3}])) == [[0, 1, 2]]


def test_top_k_takes_both_zeros_for_equal() -> None:
    assert kept(run("top_k", [[-0.0, 0.0, 0.0]], [{"top_k": 1}])) == [[0]]


@settings(max_examples=80)
@given(st.lists(st.tuples(tied, st.integers(-1, V + 2)), min_size=1, max_size=5))
def test_top_k_equals_plain_python(pairs: list[tuple[list[float], int]]) -> None:
    result = run("top_k", [logits for logits, _ in pairs], [{"top_k": k} for _, k in pairs])
    for row, (logits, k) in zip(result.tolist(), pairs, strict=True):
        best = best_first(logits)[: k if k > 0 else V]
        assert row == [logits[token] if token in best else -INF for token in range(V)]


def test_top_p_keeps_a_token_while_the_mass_before_it_is_below() -> None:
    logits = [[math.log(p) for p in (0.2, 0.5, 0.3)]] * 3
    result = run("top_p", logits, [{"top_p": 0.49}, {"top_p": 0.51}, {"top_p": 0.81}])
    assert kept(result) == [[1], [1, 2], [0, 1, 2]]


def test_top_p_stops_where_the_mass_is_reached_exactly() -> None:
    assert kept(run("top_p", [[0.0] * 4], [{"top_p": 0.5}])) == [[0, 1]]


def test_top_p_that_underflows_keeps_the_best() -> None:
    assert kept(run("top_p", [[0.0, 1.0]], [{"top_p": 1e-46}])) == [[1]]


def test_top_p_works_on_what_is_left() -> None:
    logits = [[math.log(0.5), -INF, math.log(0.3)]]
    assert kept(run("top_p", logits, [{"top_p": 0.62}])) == [[0]]


def test_tiny_top_p_keeps_the_best_lowest_id() -> None:
    assert kept(run("top_p", [[1.0, 5.0, 5.0]], [{"top_p": 1e-9}])) == [[1]]


def test_top_p_one_is_off_even_where_rounding_reaches_one_early() -> None:
    logits = [[100.0, 0.0, -50.0]]
    assert torch.equal(run("top_p", logits, [{"top_p": 1.0}]), torch.tensor(logits))


def test_top_p_of_equals_takes_the_lowest_ids() -> None:
    assert kept(run("top_p", [[0.0] * 8], [{"top_p": 0.3}])) == [[0, 1, 2]]


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999])
def test_top_p_among_thousands_of_equals_is_right_to_the_last_of_them(top_p: float) -> None:
    """Equal weights round alike: a total in float32 would be off by a hundred of these tokens."""
    logits = (torch.randn(1, 129280, generator=torch.Generator().manual_seed(3)) * 1.5).round()
    count = len(kept(run("top_p", logits.tolist(), [{"top_p": top_p}]))[0])
    mass = logits[0].double().softmax(0).sort(descending=True).values.cumsum(0)
    assert mass[count - 2] < top_p + 2e-7
    assert mass[count - 1] > top_p - 2e-7


@settings(max_examples=80)
@given(st.lists(st.tuples(st.one_of(spread, tied), st.floats(2**-7, 1, width=32)), min_size=1, max_size=4))
def test_top_p_equals_plain_python(pairs: list[tuple[list[float], float]]) -> None:
    result = kept(run("top_p", [logits for logits, _ in pairs], [{"top_p": p} for _, p in pairs]))
    for ids, (logits, top_p) in zip(result, pairs, strict=True):
        weights = [math.exp(logit - max(logits)) for logit in logits]
        mass = 0.0
        for place, token in enumerate(best_first(logits)):
            decided = abs(mass - top_p) > 1e-6 and logits[token] > -INF
            if decided:
                assert (token in ids) == (place == 0 or top_p >= 1 or mass < top_p)
            mass += weights[token] / sum(weights)


@pytest.mark.parametrize("name", ["bias", "penalties", "temperature", "min_p", "top_k", "top_p"])
def test_no_rows(name: str) -> None:
    assert stage(name, V).run(torch.zeros(0, V), batch([], V)).shape == (0, V)
