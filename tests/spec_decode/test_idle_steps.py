"""Steps that drafted for nobody are shown as one: each row with its token's place, its own blocks and its taps."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from deepinfer_core.engine.speculation_idle import IdleRows, joined
from deepinfer_core.engine.step_inputs import StepInputs

GROUPS = ("full", "window")


def step(rng: np.random.Generator, redirects: bool) -> IdleRows:
    """A few rows of some requests, each with tables as wide as the longest needs."""
    requests = int(rng.integers(1, 5))
    counts = rng.integers(1, 4, requests).astype(np.int32)
    starts = rng.integers(0, 20, requests)
    owners = np.repeat(np.arange(requests), counts)
    slots = rng.permutation(8)[:requests]
    ends = np.cumsum(counts)
    width = int(rng.integers(1, 6))
    inputs = StepInputs(
        row_requests=owners,
        row_slots=slots[owners],
        positions=np.arange(int(ends[-1])) + np.repeat(starts - (ends - counts), counts),
        cu_seqlens=np.concatenate([[0], ends]).astype(np.int32),
        seq_lens=(starts + counts).astype(np.int32),
        counts=counts,
        tables={name: rng.integers(1, 99, (requests, width)).astype(np.int32) for name in (*GROUPS, "other")},
        redirect_below=rng.integers(1, 9, requests) if redirects else None,
        sample_rows=ends - 1,
        sample_slots=slots,
        sample_positions=starts + counts,
        drafts=None,
        entering=[],
        prompts=[],
    )
    rows = len(owners)
    taps = [torch.from_numpy(rng.random((rows, *shape))) for shape in ((3,), (2, 2))]
    return IdleRows(inputs=inputs, token_ids=torch.from_numpy(rng.integers(0, 50, rows)), taps=taps)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("redirects", [0.0, 0.5])
def test_rows_keep_what_is_theirs(count: int, redirects: float) -> None:
    rng = np.random.default_rng(random.getrandbits(63))
    steps = [step(rng, bool(rng.random() < redirects)) for _ in range(count)]
    whole = joined(steps, GROUPS)
    assert whole.token_ids is not None
    rows = [(one, row) for one in steps for row in range(len(one.inputs.positions))]
    assert len(rows) == len(whole.inputs.positions) == int(whole.inputs.cu_seqlens[-1])
    for i, (one, row) in enumerate(rows):
        mine, request, before = whole.inputs, whole.inputs.row_requests[i], one.inputs.row_requests[row]
        assert mine.positions[i] == one.inputs.positions[row]
        assert mine.row_slots[i] == one.inputs.row_slots[row]
        assert mine.seq_lens[request] == one.inputs.seq_lens[before]
        assert mine.counts[request] == one.inputs.counts[before]
        assert mine.cu_seqlens[request] <= i < mine.cu_seqlens[request + 1]
        for name in GROUPS:
            table = one.inputs.tables[name][before]
            assert mine.tables[name][request].tolist()[: len(table)] == table.tolist()
            assert not mine.tables[name][request, len(table) :].any()
        below = 0 if one.inputs.redirect_below is None else one.inputs.redirect_below[before]
        assert (0 if mine.redirect_below is None else mine.redirect_below[request]) == below
        assert whole.token_ids[i] == one.token_ids[row]  # type: ignore[index]
        for tap, own in zip(whole.taps, one.taps, strict=True):
            assert torch.equal(tap[i], own[row])


def test_without_the_tokens_of_every_step_there_are_none() -> None:
    rng = np.random.default_rng(random.getrandbits(63))
    graph = IdleRows(inputs=step(rng, False).inputs, token_ids=None, taps=())
    assert joined([graph, graph], GROUPS).token_ids is None
