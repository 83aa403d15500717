"""Runner operators of the reference backend."""

from __future__ import annotations

import torch
from reference_support import operator

from deepinfer_core.api import AppendTokensRequest, InputIdsRequest, SlotMappingRequest

HISTORY = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.int32)
NONE = torch.zeros(0, dtype=torch.int64)


def test_input_ids_reads_slot_and_position() -> None:
    ids = operator(InputIdsRequest()).run(HISTORY, torch.tensor([1, 0, 1]), torch.tensor([3, 0, 0]))
    assert ids.tolist() == [8, 1, 5]
    assert ids.dtype == torch.int64


def test_input_ids_of_no_rows() -> None:
    assert operator(InputIdsRequest()).run(HISTORY, NONE, NONE).shape == (0,)


def test_slot_mapping_is_block_and_offset() -> None:
    table = torch.tensor([[4, 9, 0], [2, 1, 7]], dtype=torch.int32)
    rows, positions = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 5, 3, 11])
    slots = operator(SlotMappingRequest(block_size=4)).run(table, rows, positions)
    assert slots.tolist() == [16, 37, 11, 31]
    assert slots.dtype == torch.int64


def test_slot_mapping_does_not_overflow_int32() -> None:
    table = torch.tensor([[2**31 - 1]], dtype=torch.int32)
    slots = operator(SlotMappingRequest(block_size=64)).run(table, torch.tensor([0]), torch.tensor([63]))
    assert slots.item() == (2**31 - 1) * 64 + 63


def test_slot_mapping_of_no_rows() -> None:
    assert operator(SlotMappingRequest(block_size=4)).run(HISTORY, NONE, NONE).shape == (0,)


def test_append_writes_those_places_only() -> None:
    history = HISTORY.clone()
    operator(AppendTokensRequest()).run(
        history, torch.tensor([0, 1]), torch.tensor([3, 1]), torch.tensor([70000, 9], dtype=torch.int64)
    )
    assert history.tolist() == [[1, 2, 3, 70000], [5, 9, 7, 8]]


def test_append_stores_a_failed_row_as_zero() -> None:
    history = HISTORY.clone()
    operator(AppendTokensRequest()).run(history, torch.tensor([1]), torch.tensor([2]), torch.tensor([-1]))
    assert history[1].tolist() == [5, 6, 0, 8]


def test_append_takes_several_rows_of_one_slot() -> None:
    history = HISTORY.clone()
    operator(AppendTokensRequest()).run(
        history, torch.tensor([0, 0, 0]), torch.tensor([1, 2, 3]), torch.tensor([20, 30, 40])
    )
    assert history.tolist() == [[1, 20, 30, 40], [5, 6, 7, 8]]


def test_append_of_no_rows() -> None:
    history = HISTORY.clone()
    operator(AppendTokensRequest()).run(history, NONE, NONE, NONE)
    assert torch.equal(history, HISTORY)
