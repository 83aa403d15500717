"""Attention by tiles on the host: values that are not finite, values in place or gathered, and what is tried."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepinfer_batch_invariance import attention_check
from deepinfer_batch_invariance.attention_tiles import FEW_ROWS, runs_of, spans_of
from deepinfer_batch_invariance.self_check import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from invariance import normal, operator
from test_attention import BLOCK, Requests, paged

from deepinfer_core.api import PlanError

WINDOWS = (None, 13, 100)
PROVIDER = "batch_invariance:paged"


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("rows", [40, FEW_ROWS])
def test_a_later_row_that_is_not_finite_moves_no_earlier_one(rows: int, window: int | None) -> None:
    """Rows of one step, a prompt's or drafts; the values of one of them are NaN."""
    request, _ = paged(window=window)
    op, requests = operator(request, PROVIDER), Requests([60, 60], 1)
    cache = {name: normal(requests.num_blocks, BLOCK, 2, 24, seed=seed) for seed, name in enumerate(("key", "value"))}
    query = normal(2 * rows, 6, 24, seed=5)
    layout, _ = requests.step([(0, 60 - rows, 60), (1, 60 - rows, 60)])
    clean = op.run(query, cache, op.plan(layout))
    for lost in (rows - 5, rows - 1):
        broken = {name: tensor.clone() for name, tensor in cache.items()}
        position = 60 - rows + lost
        broken["value"][requests.table[0, position // BLOCK].long(), position % BLOCK] = float("nan")
        found = op.run(query, broken, op.plan(layout))
        assert same_bits(found[:lost], clean[:lost])
        assert found[lost : rows - 1].isnan().all()
        assert same_bits(found[rows:], clean[rows:])


@pytest.mark.parametrize("window", WINDOWS)
@settings(max_examples=10)
@given(lengths=st.lists(st.integers(1, 700), min_size=1, max_size=7))
def test_decode_rows_read_values_in_place_or_gathered(lengths: list[int], window: int | None) -> None:
    request, over = paged(window=window)
    op, requests = operator(request, PROVIDER), Requests(lengths, 2)
    run = over(requests)
    layout, rows = requests.step([(r, length - 1, length) for r, length in enumerate(lengths)])
    assert op._in_place, "on this machine the two ways give different bits: values are always gathered"
    in_place = run(op, layout, rows)
    op._in_place = False
    assert same_bits(run(op, layout, rows), in_place)


@settings(max_examples=30)
@given(data=st.data(), window=st.sampled_from(WINDOWS))
def test_every_row_is_in_one_tile(data: st.DataObject, window: int | None) -> None:
    lengths = data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=6))
    starts = [data.draw(st.integers(0, length - 1)) for length in lengths]
    request, _ = paged(window=window)
    requests = Requests(lengths, 0)
    layout, rows = requests.step([(r, starts[r], length) for r, length in enumerate(lengths)])
    tiles = [tile for span in spans_of(request, layout, runs_of(request, layout)) for tile in span.tiles]  # type: ignore[arg-type]
    assert sorted(row for tile in tiles for row in tile.rows.tolist()) == list(range(len(rows)))
    for tile in tiles:
        visible = tile.hidden.shape[-1] - tile.hidden[:, 0, :, 0].sum(-1) + tile.seen
        positions = layout.positions[tile.rows].view(visible.shape) + 1
        assert torch.equal(visible, positions if window is None else positions.clamp(max=window))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_product_that_moves_a_row_is_refused(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = torch.bmm

    def by_rows(left: torch.Tensor, right: torch.Tensor, **options: Any) -> torch.Tensor:
        """Another order of adding from 20 rows on."""
        if left.shape[1] < 20:
            return multiply(left, right, **options)
        return multiply(left.flip(2), right.flip(1), **options)

    assert attention_check.check_products(64, threads)
    monkeypatch.setattr(torch, "bmm", by_rows)
    with pytest.raises(PlanError, match=r"attention of heads of 64 over \d+ keys"):
        attention_check.check_products(64, threads)
    request, _ = paged()
    with pytest.raises(PlanError):
        operator(request, PROVIDER, threads)
