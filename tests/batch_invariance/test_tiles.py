"""Cutting rows into tiles."""

from __future__ import annotations

import pytest
import torch
from deepinfer_batch_invariance.tiles import ALIGNMENT, COUNTS, Tiles
from hypothesis import given
from hypothesis import strategies as st

counts_of = st.lists(st.sampled_from(COUNTS), min_size=1, max_size=6, unique=True)


@given(counts=counts_of, rows=st.integers(0, 900))
def test_every_row_once_in_tiles_of_the_given_counts(counts: list[int], rows: int) -> None:
    tiles = Tiles(counts)
    shapes = []

    def double(part: torch.Tensor) -> torch.Tensor:
        assert part.is_contiguous()
        assert part.data_ptr() % ALIGNMENT == 0
        shapes.append(len(part))
        return part * 2

    x = torch.arange(3.0 * rows).view(rows, 3)
    assert torch.equal(tiles.run(double, x), x * 2)
    assert set(shapes) <= set(counts)
    assert sum(shapes) >= rows


@given(rows=st.integers(1, 600))
def test_little_is_filled_up(rows: int) -> None:
    assert sum(Tiles(COUNTS).cut(rows)) <= max(2, rows + max(8, rows // 4))


def test_what_is_filled_up_is_zero() -> None:
    seen = []

    def keep(part: torch.Tensor) -> torch.Tensor:
        seen.append(part.clone())
        return part

    Tiles([4]).run(keep, torch.ones(5, 2))
    assert [part.sum(1).tolist() for part in seen] == [[2, 2, 2, 2], [2, 0, 0, 0]]


@pytest.mark.parametrize("rows", [0, 3, 4, 5])
def test_several_inputs_and_results(rows: int) -> None:
    a, b = torch.rand(rows, 2), torch.rand(rows, 3)
    total, first = Tiles([4]).run_all(lambda x, y: (y + x[:, :1], x), (a, b))
    assert torch.equal(total, b + a[:, :1])
    assert torch.equal(first, a)
