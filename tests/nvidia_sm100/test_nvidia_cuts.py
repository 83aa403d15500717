"""Top-k and top-p over rows of every kind, against the definition in float64: no sorting is done, so it must show.

Rows are wide enough for lists of candidates, and some defeat them: all equal, all kept, a guess that is too high.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_support import ON_GPU, here, operator
from reference_support import batch
from toys.seeds import module_seed

from deepinfer_core.api import SamplingRequest

INF = float("inf")
SEED = module_seed(__name__)
VOCAB = 129280 if ON_GPU else 9001
Row = Callable[[random.Random, torch.Generator, int], torch.Tensor]


def normal(scale: float, decimals: int | None = None) -> Row:
    def make(source: random.Random, draw: torch.Generator, width: int) -> torch.Tensor:
        row = torch.randn(width, generator=draw) * scale
        return row if decimals is None else row.round(decimals=decimals)

    return make


def masked(source: random.Random, draw: torch.Generator, width: int) -> torch.Tensor:
    return torch.where(torch.rand(width, generator=draw) < 0.003, torch.randn(width, generator=draw) * 2, -INF)


def peaked(source: random.Random, draw: torch.Generator, width: int) -> torch.Tensor:
    row = torch.randn(width, generator=draw) * 2
    row[source.randrange(width)] += 20
    return row


def one_side(source: random.Random, draw: torch.Generator, width: int) -> torch.Tensor:
    """All that matters lies in one part, in neighbours: a sample of runs misjudges it."""
    row = torch.randn(width, generator=draw)
    first = source.randrange(width - 700)
    row[first : first + 700] += 9
    return row


def signed_zeros(source: random.Random, draw: torch.Generator, width: int) -> torch.Tensor:
    return torch.where(torch.rand(width, generator=draw) < 0.5, 0.0, -0.0)


def few(source: random.Random, draw: torch.Generator, width: int) -> torch.Tensor:
    row = torch.full((width,), -INF)
    row[source.sample(range(width), 7)] = torch.randn(7, generator=draw)
    return row


ROWS: dict[str, Row] = {
    "wide": normal(3.0),
    "narrow": normal(0.2),
    "huge": normal(1e20),
    "ties": normal(2.0, 1),
    "whole numbers": normal(1.5, 0),
    "masked": masked,
    "peaked": peaked,
    "one side": one_side,
    "signed zeros": signed_zeros,
    "few": few,
}


def some_of(limits: list[Any], source: random.Random, width: int) -> list[Any]:
    """All limits on a GPU and over few tokens; in the interpreter a wide row takes seconds: others in each run."""
    return limits if ON_GPU or width < VOCAB else source.sample(limits, 4)


def cut(stage: str, logits: torch.Tensor, limits: list[Any]) -> torch.Tensor:
    op = operator(SamplingRequest(stage=stage, vocab_size=logits.shape[1]))
    step = batch([{stage: limit} for limit in limits], logits.shape[1])
    found: torch.Tensor = op.run(here(logits.clone()), here(step)).cpu()
    return found


def kept_prefix(row: torch.Tensor, found: torch.Tensor) -> tuple[int, torch.Tensor]:
    """How many stay, and all ids in order; what stays must be the best of them, as they were."""
    order = row.sort(descending=True, stable=True).indices
    finite = int((row > -INF).sum())
    kept = int((found > -INF).sum())
    assert kept <= finite
    assert torch.equal(found[order[:kept]], row[order[:kept]])
    assert bool((found[order[kept:]] == -INF).all())
    return kept, order


@pytest.mark.parametrize("width", [VOCAB, 1003])
@pytest.mark.parametrize("kind", ROWS)
def test_top_k_keeps_exactly_the_best(kind: str, width: int) -> None:
    source, draw = random.Random(f"{SEED} {kind} {width}"), torch.Generator().manual_seed(SEED)
    limits = [1, 2, 50, source.randrange(1, 900), source.randrange(1, width), width - 1, 0, width, width + 3]
    limits = some_of(limits, source, width)
    logits = torch.stack([ROWS[kind](source, draw, width) for _ in limits])
    found = cut("top_k", logits, limits)
    for row, result, limit in zip(logits, found, limits, strict=True):
        kept, _ = kept_prefix(row, result)
        finite = int((row > -INF).sum())
        assert kept == (min(limit, finite) if 0 < limit < width else finite), f"seed {SEED}, top_k {limit}"


@pytest.mark.parametrize("width", [VOCAB, 1003])
@pytest.mark.parametrize("kind", ROWS)
def test_top_p_keeps_the_fewest_that_reach_it(kind: str, width: int) -> None:
    source, draw = random.Random(f"{SEED} {kind} {width}"), torch.Generator().manual_seed(SEED)
    limits = some_of([0.0, -1.0, 0.1, 0.5, 0.9, 0.95, source.random(), 0.999, 1.0, 1.5], source, width)
    logits = torch.stack([ROWS[kind](source, draw, width) for _ in limits])
    found = cut("top_p", logits, limits)
    for row, result, limit in zip(logits, found, limits, strict=True):
        kept, order = kept_prefix(row, result)
        mass = row[order].double().softmax(0).cumsum(0)
        finite = int((row > -INF).sum())
        if limit >= 1 or finite == 0:  # a mask may close every token: such a row stays as it is
            assert kept == finite
            continue
        # Probabilities are float32, and so is the row's sum of exponentials.
        slack = 2e-6
        assert kept >= 1
        assert kept <= 1 or mass[kept - 2] < limit + slack, f"seed {SEED}, top_p {limit}: {kept} stay"
        assert kept == finite or mass[kept - 1] >= limit - slack, f"seed {SEED}, top_p {limit}: {kept} stay"


def test_broken_rows_stay_broken_and_touch_no_other() -> None:
    draw = torch.Generator().manual_seed(SEED)
    logits = torch.randn(6, VOCAB, generator=draw)
    logits[0, 77], logits[1, VOCAB - 1], logits[2] = float("nan"), INF, -INF
    logits[3, [5, 9]] = float("nan")
    for stage, limit in (("top_k", 3), ("top_p", 0.6)):
        found = cut(stage, logits, [limit] * 6)
        assert found[0, 77].isnan()
        assert found[1, VOCAB - 1] == INF
        assert bool((found[2] == -INF).all())
        assert found[3, 5].isnan()
        alone = cut(stage, logits[4:], [limit] * 2)
        assert torch.equal(found[4:], alone)


def test_rows_are_cut_alike_alone_and_together_and_again() -> None:
    draw = torch.Generator().manual_seed(SEED)
    logits = torch.randn(5, VOCAB, generator=draw) * 3
    for stage, limits in (("top_k", [50, 3, 900, 50, 3]), ("top_p", [0.9, 0.99, 0.3, 0.9, 0.99])):
        together = cut(stage, logits, limits)
        for row in (0, 2, 4):
            assert torch.equal(cut(stage, logits[row : row + 1], limits[row : row + 1])[0], together[row])
        assert torch.equal(cut(stage, logits, limits), together)
