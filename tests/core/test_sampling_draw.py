"""The draw of the reference backend: exact, seeded, and distributed as softmax. Seeds are fixed."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch
from reference_support import batch, stage
from scipy.stats import chisquare

from deepinfer_core.api import STAGES, SamplingBatch
from deepinfer_core.reference.draw import lowest_argmax
from deepinfer_core.reference.philox import log_exponential, noise_words

NAN, INF = float("nan"), float("inf")
DRAWS = 20000


def draw(logits: torch.Tensor, step: SamplingBatch) -> list[int]:
    result: torch.Tensor = stage("draw", logits.shape[1]).run(logits, step)
    assert result.dtype == torch.int64
    return result.tolist()


def many(row: dict[str, Any], logits: list[float], *, by: str, names: tuple[str, ...] = ("draw",)) -> torch.Tensor:
    """Counts of ``DRAWS`` draws of one distribution, over seeds, positions or children."""
    vocab_size = len(logits)
    step = batch([row], vocab_size)
    index = torch.arange(DRAWS)
    step.slots = torch.zeros(DRAWS, dtype=torch.int64)
    step.positions = step.positions.expand(DRAWS)
    if by == "position":
        step.positions = step.positions + index
    else:
        step.slots = index
        for name in (field.name for field in step.state.__attrs_attrs__):
            value = getattr(step.state, name)
            setattr(step.state, name, value.repeat_interleave(DRAWS, dim=0) if torch.is_tensor(value) else value)
        setattr(step.state, {"seed": "seed_lo", "seed_hi": "seed_hi", "child": "child"}[by], index)
    table = torch.tensor([logits]).repeat(DRAWS, 1)
    for name in names:
        table = stage(name, vocab_size).run(table, step)
    return torch.bincount(table, minlength=vocab_size)


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible] / probabilities[possible].sum() * counts.sum()
    return float(chisquare(counts[possible].numpy(), expected.numpy()).pvalue)


LOGITS = [0.0, 1.0, -1.0, 0.5, -2.0, 2.0, -0.5]
PLAIN = torch.tensor(LOGITS, dtype=torch.float64).softmax(0)


@pytest.mark.parametrize("by", ["seed", "seed_hi", "position", "child"])
def test_draws_follow_softmax(by: str) -> None:
    assert p_value(many({"prompt": [0], "seed": 12345}, LOGITS, by=by), PLAIN) > 1e-3


def test_the_test_itself_sees_a_wrong_distribution() -> None:
    counts = many({"prompt": [0], "seed": 12345}, LOGITS, by="seed")
    assert p_value(counts, torch.tensor(LOGITS, dtype=torch.float64).mul(1.05).softmax(0)) < 1e-3


def test_a_wide_vocabulary_is_drawn_evenly() -> None:
    counts = many({"prompt": [0]}, [0.0] * 65, by="seed")
    assert p_value(counts, torch.full((65,), 1 / 65, dtype=torch.float64)) > 1e-3


def test_neighbouring_positions_are_independent() -> None:
    step = batch([{"prompt": [0], "seed": 7}], 3)
    step.slots, step.positions = torch.zeros(DRAWS, dtype=torch.int64), torch.arange(DRAWS)
    tokens = torch.tensor(draw(torch.zeros(DRAWS, 3), step))
    pairs = torch.bincount(tokens[:-1:2] * 3 + tokens[1::2], minlength=9)
    assert p_value(pairs, torch.full((9,), 1 / 9, dtype=torch.float64)) > 1e-3


def filtered(keep: list[int], weights: torch.Tensor = PLAIN) -> torch.Tensor:
    result = torch.zeros_like(weights)
    result[keep] = weights[keep]
    return result


# PLAIN, best first: id 5 .533, 1 .196, 3 .119, 0 .072, 6 .044, 2 .027, 4 .010.
STAGE_CASES: list[tuple[str, dict[str, Any], torch.Tensor]] = [
    ("mask", {"allowed": [0, 2, 5]}, filtered([0, 2, 5])),
    ("bias", {"bias": {4: 3.0}}, (torch.tensor(LOGITS).double() + torch.eye(7)[4].double() * 3).softmax(0)),
    (
        "penalties",
        {"prompt": [5], "output": [3, 3], "repetition": 2.0, "frequency": 0.5},
        torch.tensor([0.0, 1.0, -1.0, -0.75, -2.0, 1.0, -0.5]).double().softmax(0),
    ),
    ("temperature", {"temperature": 2.0}, torch.tensor(LOGITS).double().div(2).softmax(0)),
    ("min_p", {"min_p": 0.2}, filtered([5, 1, 3])),
    ("top_k", {"top_k": 4}, filtered([5, 1, 3, 0])),
    ("top_p", {"top_p": 0.84}, filtered([5, 1, 3])),
]


@pytest.mark.parametrize(("name", "row", "expected"), STAGE_CASES, ids=[case[0] for case in STAGE_CASES])
def test_each_stage_alone(name: str, row: dict[str, Any], expected: torch.Tensor) -> None:
    counts = many({"prompt": [6]} | row, LOGITS, by="seed", names=(name, "draw"))
    assert p_value(counts, expected) > 1e-3


def test_all_stages_combined() -> None:
    row = {
        "prompt": [5],
        "output": [1],
        "allowed": [0, 1, 2, 3, 5, 6],
        "bias": {6: 1.0},
        "repetition": 1.25,
        "presence": 0.3,
        "temperature": 0.8,
        "min_p": 0.1,
        "top_k": 5,
        "top_p": 0.9,
    }
    # Masked id 4; bias: id 6 at 0.5; penalties: id 5 at 1.6, id 1 at 0.8 - 0.3 = 0.5; divided by 0.8.
    scaled = torch.tensor([0.0, 0.5, -1.0, 0.5, -INF, 1.6, 0.5], dtype=torch.float64) / 0.8
    # min_p: e^(-1.6/0.8) = 0.135 stays, e^(-2.6/0.8) = 0.039 goes; top_k 5: ids 5 1 3 6 0 all stay;
    # top_p: the masses before them are 0, .53, .66, .80, .93.
    expected = filtered([5, 1, 3, 6], scaled.softmax(0))
    assert p_value(many(row, LOGITS, by="seed", names=STAGES), expected) > 1e-3


def test_a_draw_is_the_argmax_of_logits_minus_log_noise() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 101, generator=generator)
    rows = [{"prompt": [0] * (1 + i % 5), "seed": 2**63 + i * 977, "child": i % 3} for i in range(40)]
    step = batch(rows, 101)
    words = noise_words(step.state.seed_lo, step.state.seed_hi, step.state.child, step.positions, 0, 101)
    scores = logits - log_exponential(words)
    assert draw(logits, step) == [row.index(max(row)) for row in scores.tolist()]


def test_equal_scores_go_to_the_lowest_id() -> None:
    assert lowest_argmax(torch.tensor([[1.0, 2.0, 2.0], [0.0, -0.0, -1.0], [-0.0, 0.0, -1.0]])).tolist() == [1, 0, 0]


def test_the_same_seed_gives_the_same_tokens_wherever_the_row_stands() -> None:
    row = {"prompt": [0, 1], "seed": 99}
    strangers = [{"prompt": [0], "seed": s} for s in range(5)]
    logits = torch.linspace(-1, 1, 50).repeat(6, 1)
    first = draw(logits, batch([row, *strangers], 50))[0]
    last = draw(logits, batch([*strangers, row], 50))[5]
    assert first == last == draw(logits[:1], batch([row], 50))[0]


def test_temperature_of_the_row_scales_no_noise() -> None:
    """The draw reads temperature only to tell greedy rows: scaling is its own stage's work."""
    logits = torch.linspace(-1, 1, 50)[None]
    assert draw(logits, batch([{"temperature": 0.5}], 50)) == draw(logits, batch([{"temperature": 5.0}], 50))


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, 0.0, 0.0], [-INF, -5.0, -5.0]])
    assert draw(logits, batch([{"temperature": 0.0, "seed": s} for s in range(3)], 3)) == [1, 0, 1]


def float32_below(value: float) -> float:
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    (result,) = struct.unpack("<f", struct.pack("<I", bits - 1))
    return float(result)


def test_the_greedy_limit_is_one_hundred_thousandth() -> None:
    flat = torch.zeros(200, 8)
    at = batch([{"temperature": 1e-5, "seed": s} for s in range(200)], 8)
    below = batch([{"temperature": float32_below(1e-5), "seed": s} for s in range(200)], 8)
    assert len(set(draw(flat, at))) == 8
    assert set(draw(flat, below)) == {0}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "row", [[NAN, 1.0, 2.0], [1.0, NAN, -INF], [INF, 1.0, 2.0], [1.0, INF, NAN], [-INF] * 3, [NAN] * 3]
)
def test_a_row_that_is_no_distribution_gives_minus_one(row: list[float], temperature: float) -> None:
    logits = torch.tensor([[5.0, 0.0, 0.0], row, [0.0, 0.0, 5.0]])
    result = draw(logits, batch([{"temperature": 0.0}, {"temperature": temperature}, {"temperature": 0.0}], 3))
    assert result == [0, -1, 2]


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[-INF, 0.0, -INF, -90.0, -INF]]).repeat(500, 1)
    assert set(draw(logits, batch([{"seed": s} for s in range(500)], 5))) == {1}


def test_one_token_left_is_drawn() -> None:
    logits = torch.full((20, 9), -INF)
    logits[:, 4] = -1e30
    assert set(draw(logits, batch([{"seed": s} for s in range(20)], 9))) == {4}


def test_logits_are_left_alone() -> None:
    logits = torch.linspace(-1, 1, 10)[None]
    before = logits.clone()
    draw(logits, batch([{}], 10))
    assert torch.equal(logits, before)


def test_many_wide_rows_equal_few() -> None:
    """More rows than one portion of noise holds."""
    vocab_size = 1 << 18
    logits = torch.zeros(5, vocab_size)
    together = draw(logits, batch([{"seed": s} for s in range(5)], vocab_size))
    assert together == [draw(logits[:1], batch([{"seed": s}], vocab_size))[0] for s in range(5)]
    assert len(set(together)) == 5


def test_no_rows() -> None:
    assert draw(torch.zeros(0, 7), batch([], 7)) == []


def test_a_rare_token_is_drawn_as_often_as_it_should() -> None:
    logits = [0.0, math.log(1e-3 / (1 - 1e-3))]
    counts = many({"prompt": [0]}, logits, by="seed")
    assert p_value(counts, torch.tensor([1 - 1e-3, 1e-3], dtype=torch.float64)) > 1e-3
