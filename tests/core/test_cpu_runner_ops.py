"""The host's runner operators against the reference's."""

from __future__ import annotations

from typing import Any

import pytest
import reference_support
import torch
from cpu_support import operator

from deepinfer_core.api import AppendTokensRequest, InputIdsRequest, OpRequest, SlotMappingRequest


def both(request: OpRequest, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return operator(request).run(*args), reference_support.operator(request).run(*args)


def integers(high: int, *shape: int, seed: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("rows", [0, 1, 37])
def test_input_ids(rows: int) -> None:
    history = integers(2**31, 5, 9, seed=1, dtype=torch.int32)
    found, expected = both(InputIdsRequest(), history, integers(5, rows, seed=2), integers(9, rows, seed=3))
    assert found.dtype == torch.int64
    assert torch.equal(found, expected)


@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_slot_mapping(rows: int, block_size: int) -> None:
    table = integers(2**31, 4, 6, seed=1, dtype=torch.int32)
    owners, positions = integers(4, rows, seed=2), integers(6 * block_size, rows, seed=3)
    found, expected = both(SlotMappingRequest(block_size=block_size), table, owners, positions)
    assert found.dtype == torch.int64
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("slots", "positions", "tokens"),
    [([], [], []), ([0, 1, 1], [3, 0, 2], [70000, -1, 9])],
)
def test_append(slots: list[int], positions: list[int], tokens: list[int]) -> None:
    histories = [integers(50, 2, 4, seed=1, dtype=torch.int32) for _ in range(2)]
    where = [torch.tensor(values, dtype=torch.int64) for values in (slots, positions, tokens)]
    operator(AppendTokensRequest()).run(histories[0], *where)
    reference_support.operator(AppendTokensRequest()).run(histories[1], *where)
    assert torch.equal(histories[0], histories[1])


def test_ids_do_not_follow_the_history() -> None:
    history = integers(50, 2, 4, seed=1, dtype=torch.int32)
    ids = operator(InputIdsRequest()).run(history, torch.tensor([0]), torch.tensor([1]))
    kept = ids.clone()
    history.zero_()
    assert torch.equal(ids, kept)
