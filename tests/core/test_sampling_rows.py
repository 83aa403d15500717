"""Every stage treats its rows one by one: alone or among others, a row comes out the same bit for bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from reference_support import batch, stage

from deepinfer_core.api import STAGES, SamplingBatch

FILTERS = STAGES[:-1]
NAN, INF = float("nan"), float("inf")


def random_row(source: random.Random, vocab_size: int) -> dict[str, Any]:
    """Each parameter is off in about a third of the rows."""

    def maybe(off: Any, *values: Any) -> Any:
        return off if source.random() < 1 / 3 else source.choice(values)

    tokens = [source.randrange(vocab_size) for _ in range(12)]
    return {
        "prompt": tokens[: source.randint(1, 6)],
        "output": tokens[6 : 6 + source.randint(0, 6)],
        "temperature": maybe(1.0, 0.0, 1e-4, 0.3, 0.7, 1.9),
        "min_p": maybe(0.0, 1e-6, 0.01, 0.3),
        "top_p": maybe(1.0, 0.999, 0.9, 0.5, 1e-6),
        "top_k": maybe(0, 1, 5, 50, vocab_size),
        "presence": maybe(0.0, 0.3, -1.0),
        "frequency": maybe(0.0, 0.7, -0.2),
        "repetition": maybe(1.0, 1.3, 0.8),
        "seed": source.getrandbits(64),
        "child": source.randrange(4),
        "min_end": maybe(0, 20),
        "stop_ids": maybe([], [1, 2]),
        "bias": maybe({}, {0: 1.5, vocab_size - 1: -2.0}),
        "bad_words": maybe([], [[tokens[0]], [tokens[5], 3]]),
    }


def one_row(whole: SamplingBatch, index: int) -> SamplingBatch:
    """The row alone in its step, with its slot where it was."""
    position = int(whole.positions[index])
    return SamplingBatch(
        state=whole.state,
        slots=whole.slots[index : index + 1],
        positions=whole.positions[index : index + 1],
        token_limit=whole.token_limit,
        active=whole.active,
        max_position=position,
        grammar=None,
    )


def scene(vocab_size: int, count: int) -> tuple[list[dict[str, Any]], torch.Tensor]:
    source = random.Random(vocab_size * 100 + count)
    rows = [random_row(source, vocab_size) for _ in range(count)]
    logits = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    return rows, logits


def through(names: tuple[str, ...], logits: torch.Tensor, step: SamplingBatch) -> torch.Tensor:
    for name in names:
        logits = stage(name, logits.shape[1]).run(logits.clone(), step)
    return logits


SIZES = [(5, 9), (97, 17), (1031, 33), (70001, 4)]


@pytest.mark.parametrize(("vocab_size", "count"), SIZES)
@pytest.mark.parametrize("name", STAGES)
def test_one_stage_alone_or_among_others(name: str, vocab_size: int, count: int) -> None:
    rows, logits = scene(vocab_size, count)
    whole = batch(rows, vocab_size, token_limit=vocab_size - 1)
    together = through((name,), logits, whole)
    for index in range(count):
        alone = through((name,), logits[index : index + 1], one_row(whole, index))
        assert torch.equal(alone[0], together[index])


@pytest.mark.parametrize(("vocab_size", "count"), SIZES)
def test_all_stages_with_the_row_in_a_batch_of_its_own(vocab_size: int, count: int) -> None:
    """Other slots, other padding of the wide fields, another width of history."""
    rows, logits = scene(vocab_size, count)
    together = through(STAGES, logits, batch(rows, vocab_size))
    for index, row in enumerate(rows):
        assert through(STAGES, logits[index : index + 1], batch([row], vocab_size))[0] == together[index]


@pytest.mark.parametrize("name", STAGES)
def test_two_threads_give_what_one_gives(name: str) -> None:
    """A lone wide row is where torch may split one row's work over threads."""
    rows, logits = scene(70001, 1)
    step = batch(rows, 70001)
    single = through((name,), logits, step)
    torch.set_num_threads(2)
    try:
        double = through((name,), logits, step)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(double, single)


@pytest.mark.parametrize(("vocab_size", "count"), SIZES)
def test_reversed_rows_give_reversed_results(vocab_size: int, count: int) -> None:
    rows, logits = scene(vocab_size, count)
    forward = through(FILTERS, logits, batch(rows, vocab_size))
    backward = through(FILTERS, logits.flip(0), batch(rows[::-1], vocab_size))
    assert torch.equal(backward.flip(0), forward)


def test_rows_that_share_a_slot_equal_rows_of_their_own() -> None:
    """Several rows of one request (drafts), each at its own position."""
    rows, logits = scene(97, 1)
    row = rows[0] | {"output": [5, 6, 7, 8], "temperature": 0.7}
    start = len(row["prompt"])
    positions = torch.arange(start, start + 5)
    logits = logits.expand(5, -1).contiguous()
    step = batch(
        [row], 97, slots=torch.zeros(5, dtype=torch.int64), positions=positions, max_position=int(positions[-1])
    )
    shared = through(STAGES, logits, step)
    for count in range(5):
        alone = batch([row | {"output": row["output"][:count]}], 97)
        assert through(STAGES, logits[:1], alone)[0] == shared[count]


@pytest.mark.parametrize("name", FILTERS)
def test_a_row_with_everything_off_passes_unchanged(name: str) -> None:
    rows, logits = scene(97, 6)
    logits[0, :4] = torch.tensor([0.0, -0.0, -INF, 1e-40])
    result = through((name,), logits, batch([{"prompt": [1, 2], "output": [3]}, *rows[1:]], 97))
    assert torch.equal(result[0].view(torch.int32), logits[0].view(torch.int32))


@pytest.mark.parametrize("broken", [NAN, INF])
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_broken_row_is_found_by_the_draw_and_harms_no_neighbour(broken: float, everywhere: bool) -> None:
    rows, logits = scene(97, 12)
    whole = batch(rows, 97)
    expected = through(STAGES, logits, whole)
    for index in range(12):
        # Token 50 is one that no row's rules mask.
        damaged = logits.clone()
        damaged[index, slice(None) if everywhere else 50] = broken
        result = through(STAGES, damaged, whole)
        assert result[index] == -1
        others = torch.arange(12) != index
        assert torch.equal(result[others], expected[others])


def test_an_empty_mask_is_found_by_the_draw_and_harms_no_neighbour() -> None:
    rows, logits = scene(97, 6)
    expected = through(STAGES, logits, batch(rows, 97))
    result = through(STAGES, logits, batch([rows[0] | {"grammar": []}, *rows[1:]], 97))
    assert result[0] == -1
    assert torch.equal(result[1:], expected[1:])
