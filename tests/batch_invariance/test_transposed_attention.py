"""Attention over keys by channel: rows that read the cache in place, what they may not read, and what is tried."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepinfer_batch_invariance import attention_check
from deepinfer_batch_invariance.attention_tiles import FEW_ROWS
from deepinfer_batch_invariance.layouts import layout_of
from deepinfer_batch_invariance.self_check import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from invariance import normal, operator, reference_operator
from test_attention import Requests, paged, transposed

from deepinfer_core.api import PlanError

WINDOWS = (None, 13, 100)
PROVIDER = "batch_invariance:paged_transposed"


@pytest.mark.parametrize("window", WINDOWS)
@settings(max_examples=10)
@given(data=st.data(), lengths=st.lists(st.integers(1, 700), min_size=1, max_size=7))
def test_rows_read_the_cache_in_place_or_gathered(data: st.DataObject, lengths: list[int], window: int | None) -> None:
    """Decode rows, drafts, and a prompt's last rows beside them."""
    request, over = transposed(window=window)
    op, requests = operator(request, PROVIDER), Requests(lengths, 2, 32)
    run = over(requests)
    counts = [min(data.draw(st.sampled_from((1, 1, 3, FEW_ROWS, 20))), length) for length in lengths]
    layout, rows = requests.step([(r, n - counts[r], n) for r, n in enumerate(lengths)])
    assert op._in_place, "on this machine the two ways give different bits: keys are always gathered"
    in_place = run(op, layout, rows)
    op._in_place = False
    assert same_bits(run(op, layout, rows), in_place)


@pytest.mark.parametrize("window", WINDOWS)
def test_steps_one_after_the_other_keep_lists_and_follow_blocks(window: int | None) -> None:
    """A batch decodes over the ends of blocks; then its rows change places, and one gets other blocks."""
    request, _ = transposed(window=window)
    op, wanted = operator(request, PROVIDER), reference_operator(paged(window=window)[0])
    key, value = normal(40, 32, 2, 24, seed=1), normal(40, 32, 2, 24, seed=2)
    plain = {"key": key.view(80, 16, 2, 24), "value": value.view(80, 16, 2, 24)}
    cache, query = op.arranged({"key": key, "value": value}), normal(3, 6, 24, seed=3)
    table = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]], dtype=torch.int32)
    for step in range(60):
        if step == 40:
            table = table[[2, 0, 1]]
        if step == 50:
            table[1] = torch.tensor([20, 31, 22, 33])
        seen = [30 + step, 62 + step, 1 + step]
        halves = torch.stack((2 * table, 2 * table + 1), -1).flatten(1)
        reference = wanted.run(query, plain, wanted.plan(layout_of(halves, 16, [1, 1, 1], seen)))
        layout = layout_of(table, 32, [1, 1, 1], seen)
        found = op.run(query, cache, op.plan(layout))
        assert torch.allclose(found, reference, rtol=1e-4, atol=1e-5)
        fresh = operator(request, PROVIDER) if step in (0, 35, 41, 50, 59) else op
        assert same_bits(fresh.run(query, cache, fresh.plan(layout)), found)


@pytest.mark.parametrize("window", [None, 13])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_what_lies_behind_a_row_is_not_read(rows: int, window: int | None) -> None:
    """Positions of later tokens, and blocks of others, hold NaN."""
    request, _ = transposed(window=window)
    op, requests = operator(request, PROVIDER), Requests([90, 90], 3, 32)
    plain = {name: normal(requests.num_blocks, 32, 2, 24, seed=seed) for seed, name in enumerate(("key", "value"))}
    query = normal(rows, 6, 24, seed=5)
    layout, _ = requests.step([(0, 70 - rows, 70)])
    clean = op.run(query, op.arranged(plain), op.plan(layout))
    first, second, third = requests.table[0].tolist()
    for tensor in plain.values():
        kept = [(block, tensor[block].clone()) for block in (first, second, third)]
        tensor.fill_(float("nan"))
        for block, values in kept:
            end = 6 if block == third else 32
            tensor[block, :end] = values[:end]
    assert same_bits(op.run(query, op.arranged(plain), op.plan(layout)), clean)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("rows", [40, FEW_ROWS])
def test_a_later_row_that_is_not_finite_moves_no_earlier_one(rows: int, window: int | None) -> None:
    request, _ = transposed(window=window)
    op, requests = operator(request, PROVIDER), Requests([60, 60], 1, 32)
    plain = {name: normal(requests.num_blocks, 32, 2, 24, seed=seed) for seed, name in enumerate(("key", "value"))}
    query = normal(2 * rows, 6, 24, seed=5)
    layout, _ = requests.step([(0, 60 - rows, 60), (1, 60 - rows, 60)])
    clean = op.run(query, op.arranged(plain), op.plan(layout))
    for lost in (rows - 5, rows - 1):
        broken = {name: tensor.clone() for name, tensor in plain.items()}
        position = 60 - rows + lost
        broken["value"][requests.table[0, position // 32].long(), position % 32] = float("nan")
        found = op.run(query, op.arranged(broken), op.plan(layout))
        assert same_bits(found[:lost], clean[:lost])
        assert found[lost : rows - 1].isnan().all()
        assert same_bits(found[rows:], clean[rows:])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_product_that_moves_a_row_is_refused(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = torch.bmm

    def by_rows(left: torch.Tensor, right: torch.Tensor, **options: Any) -> torch.Tensor:
        """Another order of adding from 20 rows on."""
        if left.shape[1] < 20:
            return multiply(left, right, **options)
        return multiply(left.flip(2), right.flip(1), **options)

    assert attention_check.check_channels(64, 64, threads)
    monkeypatch.setattr(torch, "bmm", by_rows)
    with pytest.raises(PlanError, match=r"attention of heads of 64 over \d+ keys in blocks of 64"):
        attention_check.check_channels(64, 64, threads)


def test_where_sums_over_channels_add_in_another_order_rows_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = torch.bmm

    def backwards(left: torch.Tensor, right: torch.Tensor, **options: Any) -> torch.Tensor:
        return multiply(left.flip(2), right.flip(1), **options)

    monkeypatch.setattr(torch, "bmm", backwards)
    assert not attention_check.check_channels(64, 64, 1)
    request, over = transposed()
    op, requests = operator(request, PROVIDER), Requests([50, 3], 1, 32)
    assert not op._in_place
    layout, rows = requests.step([(0, 49, 50), (1, 2, 3)])
    whole, every = requests.step([(0, 0, 50), (1, 0, 3)])
    run = over(requests)
    assert same_bits(run(op, layout, rows), run(op, whole, every)[rows])


@pytest.mark.parametrize("changes", [{"block_size": 40}, {"head_dim": 256}, {"softcap": 3.0}])
def test_what_it_does_not_serve_goes_by_tiles(changes: dict[str, Any]) -> None:
    from deepinfer_batch_invariance.plugin import _host_transposed

    request, _ = transposed(**changes)
    assert not _host_transposed(request)  # type: ignore[arg-type]
    assert _host_transposed(transposed()[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("window", WINDOWS)
def test_the_size_of_blocks_moves_no_bit(window: int | None) -> None:
    lengths = [300, 33, 65]
    found = []
    for size in (32, 48, 64):
        request, _ = transposed(window=window, block_size=size)
        op, requests = operator(request, PROVIDER), Requests(lengths, size, size)
        plain = {name: torch.full((requests.num_blocks, size, 2, 24), float("nan")) for name in ("key", "value")}
        for seed, tensor in enumerate(plain.values()):
            for number, length in enumerate(lengths):
                rows = torch.zeros(requests.blocks * size, 2, 24)
                rows[:length] = normal(length, 2, 24, seed=10 * seed + number)
                tensor[requests.table[number].long()] = rows.view(-1, size, 2, 24)
        layout, _ = requests.step([(r, length - 1 - 9 * r, length) for r, length in enumerate(lengths)])
        query = normal(len(layout.positions), 6, 24, seed=5)
        found.append(op.run(query, op.arranged(plain), op.plan(layout)))
    assert all(same_bits(result, found[0]) for result in found)
