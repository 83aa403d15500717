"""A12 (vllm-project/vllm-metal#646): a batch that mixes top_k on and off must not crash nor mix its rows.

Here for the reference operators; the rule is that 0, -1 and values of the vocabulary and more are off.
"""

from __future__ import annotations

import pytest
import torch
from sampling_rows import step, through

from deepinfer_core.api import STAGES

V = 16
FILTERS = STAGES[:-1]
ROWS: list[dict[str, float]] = [
    {"temperature": 0.0},
    {"top_k": 0},
    {"top_k": -1},
    {"top_k": 4},
    {"top_k": 16},
    {"top_k": 10**6},
    {"top_p": 1e-9},
]
OFF = [0, 1, 2, 4, 5]


def logits() -> torch.Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(646)).repeat(len(ROWS), 1)


def test_off_values_leave_their_rows_alone() -> None:
    result = through(FILTERS, logits(), step(ROWS))
    assert torch.equal(result[OFF], logits()[OFF])


def test_top_k_keeps_the_four_best_and_no_other() -> None:
    result = through(FILTERS, logits(), step(ROWS))
    best = sorted(range(V), key=lambda token: -float(logits()[3, token]))[:4]
    assert result[3].isfinite().nonzero().flatten().tolist() == sorted(best)


def test_tiny_top_p_keeps_the_best() -> None:
    result = through(FILTERS, logits(), step(ROWS))
    assert result[6].isfinite().nonzero().flatten().tolist() == [int(logits()[6].argmax())]


def test_ties_keep_exactly_k_lowest_ids() -> None:
    result = through(FILTERS, torch.zeros(len(ROWS), V), step(ROWS))
    assert result[3].isfinite().nonzero().flatten().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(40))
def test_each_row_draws_what_it_draws_alone(seed: int) -> None:
    rows = [row | {"seed": seed} for row in ROWS]
    together = through(STAGES, logits(), step(rows))
    alone = [through(STAGES, logits()[i : i + 1], step([row])) for i, row in enumerate(rows)]
    assert together.tolist() == [int(token) for token in alone]


def test_off_rows_with_one_seed_draw_one_token() -> None:
    rows = [row | {"seed": 5} for row in ROWS]
    tokens = through(STAGES, logits(), step(rows)).tolist()
    assert len({tokens[index] for index in OFF if index != 0}) == 1


def test_draws_never_leave_the_four_best() -> None:
    best = set(logits()[3].topk(4).indices.tolist())
    drawn = {int(through(STAGES, logits(), step([row | {"seed": seed} for row in ROWS]))[3]) for seed in range(60)}
    assert drawn <= best
    assert len(drawn) > 1
