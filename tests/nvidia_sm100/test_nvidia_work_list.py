"""The list of chunks that decode attention makes on the device: nothing is left out, and nothing cut needlessly."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from deepinfer_nvidia_sm100.ops.work_list import WorkList, work_list
from gpu_support import DEVICE, here

SPAN = 32


def listed(
    contexts: list[int], programs: int, rows: list[int] | None = None, window: int = 0, **whole: int
) -> WorkList:
    """Of requests with these contexts, each with one row or with one tile of ``rows``; ``whole``: when none is cut."""
    counts = np.array(rows or [1] * len(contexts))
    first = np.cumsum(counts) - counts
    positions = np.concatenate([np.arange(c - n, c) for c, n in zip(contexts, counts, strict=True)])
    tiles = None if rows is None else here(torch.from_numpy(np.stack((np.arange(len(rows)), first, counts), 1)).int())
    where = here(torch.from_numpy(positions))
    return work_list(tiles, where, len(contexts), programs, window, SPAN, **whole)


def entries(work: WorkList) -> np.ndarray:
    length = int(work.length[0])
    assert length <= work.bound
    return work.entries[:length].cpu().numpy()


def check(
    contexts: list[int], programs: int, rows: list[int] | None = None, window: int = 0, **whole: int
) -> np.ndarray:
    """Every token that a row sees is in one chunk; results have numbers of their own; tiles know theirs."""
    work = listed(contexts, programs, rows, window, **whole)
    found, tiles = entries(work), work.tiles.cpu().numpy()
    assert sorted(found[:, 6]) == list(range(len(found)))
    lengths = found[:, 5] - found[:, 4]
    assert (lengths > 0).all()
    for request, context in enumerate(contexts):
        count = 1 if rows is None else rows[request]
        mine = found[found[:, 0] == request]
        mine = mine[np.argsort(mine[:, 4])]
        begin = max(0, context - count - window + 1) // SPAN * SPAN if window else 0
        assert [begin, *mine[:-1, 5]] == list(mine[:, 4])
        assert mine[-1, 5] == context
        assert (mine[:, 4] % SPAN == 0).all()
        assert (mine[:, 3] == context - count).all()
        assert (mine[:, 2] == count).all()
        assert (mine[:, 1] == tiles[request, 0]).all()
        assert tiles[request, 1] == count
        assert (mine[:, 6] == tiles[request, 2] + np.arange(len(mine))).all()
        assert (mine[:, 7] == tiles[request, 2]).all()
        assert (mine[:, 8] == len(mine)).all()
        assert tiles[request, 3] == len(mine)
        spans = -(-np.diff([*mine[:, 4], context]) // SPAN)
        assert spans.max() - spans.min() <= 1
    return found


@pytest.mark.parametrize("programs", [1, 3, 66])
def test_contexts_of_all_lengths(programs: int) -> None:
    rng = np.random.default_rng(random.getrandbits(63))
    contexts = [int(c) for c in np.exp(rng.uniform(0, np.log(5000), 70))]  # more than one program of the kernel places
    check(contexts, programs)
    check(contexts[:9], programs, rows=[min(c, int(rng.integers(1, 5))) for c in contexts[:9]])
    check(contexts[:9], programs, window=int(rng.integers(1, 200)))


def test_the_list_has_room_for_all() -> None:
    rng = np.random.default_rng(random.getrandbits(63))
    for _ in range(60):
        count, programs = (int(n) for n in np.exp(rng.uniform(0, np.log(140), 2)))
        spread = rng.uniform(0, 9)
        contexts = [int(c) for c in np.exp(rng.uniform(0, spread, count))]
        contexts[0] = int(np.exp(rng.uniform(0, 10)))
        check(contexts, programs)


def test_equal_contexts_that_fill_the_programs_are_not_cut() -> None:
    for count, programs in ((64, 66), (64, 49), (256, 66), (45, 66)):
        assert len(entries(listed([544] * count, programs))) == count


def test_equal_contexts_are_not_cut_into_a_few_chunks_more_than_programs() -> None:
    for count, programs, each in ((12, 66, 5), (24, 66, 2), (8, 66, 8)):
        assert len(entries(listed([128 * SPAN] * count, programs))) == count * each


def test_one_context_is_cut_for_all_programs() -> None:
    assert len(entries(listed([66 * SPAN], 66))) == 66
    assert len(entries(listed([5 * SPAN], 66))) == 5


def test_a_long_context_among_short_ones_is_cut_and_begun_first() -> None:
    found = check([40, 64 * SPAN, 40, 70], 8)
    mine = found[found[:, 0] == 1]
    assert len(mine) == 7 or len(mine) == 8
    assert (found[: len(mine), 0] == 1).all()


def test_many_short_contexts_leave_a_long_one_what_room_there_is() -> None:
    found = check([*range(1, 60), 660 * SPAN], 66)
    assert 30 <= (found[:, 0] == 59).sum() <= 66


def test_contexts_that_are_nearly_equal_are_not_cut_where_that_would_take_longer() -> None:
    """As measured on an H200 with 64 places for each key head, where 22 contexts keep the memory busy."""
    for count, context, chunks in ((24, 1000, 24), (32, 544, 32), (32, 2048, 32), (20, 3000, 60), (40, 1000, 40)):
        assert len(check([context] * count, 64, filling=22, joining=112)) == chunks
    assert len(check([1000] * 24, 64)) == 48
    assert len(check([2048] + [700] * 31, 64, filling=22, joining=112)) > 32


def left_over(spans: list[int], filling: int) -> int:
    """Spans that could be read while fewer than ``filling`` contexts are left, one span of each at a time."""
    found, left = 0, np.array(spans)
    while (left > 0).any():
        found += max(0, filling - int((left > 0).sum()))
        left -= 1
    return found


def test_no_context_is_cut_exactly_where_joining_takes_longer_than_the_longest() -> None:
    """By brute force, of contexts whose longest is more or less longer than the others."""
    rng = np.random.default_rng(random.getrandbits(63))
    whole = cut = 0
    for _ in range(40):
        count, programs = int(rng.integers(17, 50)), 64
        spread, joining = int(rng.integers(1, 40)), int(rng.integers(0, 300))
        contexts = [int(n) for n in rng.integers(600, 600 + spread * SPAN, count)]
        window = int(rng.choice([0, 0, 500]))
        found = check(contexts, programs, window=window, filling=22, joining=joining)
        seen = [c - (max(0, c - window) // SPAN * SPAN if window else 0) for c in contexts]
        lost = left_over([-(-s // SPAN) for s in seen], 22)
        by_share = len(check(contexts, programs, window=window))
        assert len(found) == (count if lost <= joining else by_share)
        whole += lost <= joining and by_share > count
        cut += lost > joining
    assert whole
    assert cut


def test_the_list_lies_on_the_device() -> None:
    work = listed([5, 6], 2)
    assert {work.entries.device.type, work.tiles.device.type, work.length.device.type} == {DEVICE.type}
