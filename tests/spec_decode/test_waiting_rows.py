"""Rows that wait leave the caches as rows absorbed at once would: by a log of writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from deepinfer_spec_decode.waiting import WaitingRows, last_of_each

from deepinfer_core.api import ModelBatch, StepLayout

BLOCK, SLOTS = 4, 40


def step(rng: np.random.Generator, count: int) -> tuple[ModelBatch, torch.Tensor]:
    """A step that writes random values to random places, one row each; blocks 1 and up belong to requests."""
    slots = torch.from_numpy(rng.permutation(np.arange(BLOCK, SLOTS))[:count])
    none = torch.zeros(0, dtype=torch.int32)
    layout = StepLayout(
        block_size=BLOCK,
        cu_seqlens=none,
        seq_lens=none,
        positions=torch.from_numpy(rng.integers(0, 99, count)),
        block_table=none,
        slot_mapping=slots,
        host_query_lens=np.zeros(0, np.int32),
        host_seq_lens=np.zeros(0, np.int32),
        max_query_len=0,
        max_seq_len=0,
    )
    ids = torch.from_numpy(rng.integers(0, 99, count))
    batch = ModelBatch(token_ids=ids, positions=layout.positions, layouts={"a": layout}, caches={})
    return batch, torch.from_numpy(rng.random((count, 2)))


def keep(cache: torch.Tensor, batch: ModelBatch, values: torch.Tensor) -> None:
    """What a row leaves depends on all that waits: its token, its position, its value."""
    rows = torch.cat((values, batch.token_ids[:, None], batch.positions[:, None]), 1)
    cache[batch.layouts["a"].slot_mapping] = rows


@pytest.mark.parametrize("limit", [0, 7, 1000])
def test_a_log_of_writes(limit: int) -> None:
    rng = np.random.default_rng()
    at_once, later = (torch.full((SLOTS, 4), torch.nan, dtype=torch.float64) for _ in range(2))
    waiting, largest = WaitingRows(limit), 0
    for _ in range(30):
        batch, values = step(rng, int(rng.integers(0, 9)))
        keep(at_once, batch, values)
        waiting.add(batch, [values])
        largest = max(largest, waiting.count)
        if waiting.full or rng.random() < 0.1:
            taken = waiting.take()
            if taken is not None:
                keep(later, taken[0], taken[1][0])
            assert waiting.count == 0
    taken = waiting.take()
    if taken is not None:
        keep(later, taken[0], taken[1][0])
    assert largest <= limit + 8
    torch.testing.assert_close(later[BLOCK:], at_once[BLOCK:], rtol=0, atol=0, equal_nan=True)
    assert waiting.take() is None


def test_only_the_last_row_of_a_place_is_kept() -> None:
    slots = torch.tensor([9, 5, 9, 2, 5, 9])
    assert last_of_each(slots, 4).tolist() == [1, 1, 1, 2, 5, 9]
