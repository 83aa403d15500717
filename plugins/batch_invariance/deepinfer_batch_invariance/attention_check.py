"""Trying attention on this machine: a prompt in one piece against some of its rows alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepinfer_core.api import (
    IndexTopKRequest,
    PagedAttentionRequest,
    SparseAttentionRequest,
    StepLayout,
)

from .attention_tiles import ROWS_STEP, VALUE_BLOCK
from .key_lists import KEY_BLOCK
from .layouts import layout_of
from .self_check import moved, random_row, same_bits, threads

ROWS = 40
"""More than one block of keys."""

COUNTS = tuple(ROWS_STEP * n for n in (1, 2, 3, 5, 7, 16, 64))
BLOCKS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 64)
"""Numbers of rows, and blocks of keys, of the products that are tried."""


def check_products(dim: int, num_threads: int) -> bool:
    """Try the products of attention over tiles of rows.

    Returns whether weighted sums over rows of the cache give the bits of the products with gathered values.

    Raises:
        PlanError: a row's bits depend on how many rows are multiplied.
    """
    with threads(num_threads):
        in_place = [_products_are_steady(dim, blocks * KEY_BLOCK) for blocks in BLOCKS]
    return all(in_place)


def _products_are_steady(dim: int, width: int) -> bool:
    """Two requests; keys and values are every second row, as those of one of two heads."""
    most, part = COUNTS[-1], min(width, VALUE_BLOCK)
    queries, rows = random_row(2, most, dim), random_row(2, width, 2, dim)
    key, value = rows[:, :, 0], rows[:, :part, 1]
    shares = torch.softmax(random_row(2, most, width) * 3, -1)

    def products(n: int) -> tuple[torch.Tensor, ...]:
        query, weights, total = queries[:, :n], shares[:, :n, :part], queries[:, :n].clone()
        return (
            torch.bmm(query, key.transpose(1, 2)),
            torch.bmm(weights, value),
            torch.baddbmm(total, weights, value, out=total),
        )

    whole = products(most)
    for n in COUNTS[:-1]:
        if not all(same_bits(found, wanted[:, :n]) for found, wanted in zip(products(n), whole, strict=True)):
            raise moved(f"attention of heads of {dim} over {width} keys", f"{n} and {most} rows differ")
    columns = torch.cat([2 * torch.arange(request * width, request * width + part) + 1 for request in (0, 1)])
    first = shares[:, 0, :part].reshape(-1)
    sums = torch.embedding_bag(rows.view(-1, dim), columns, torch.tensor([0, part]), False, 0, False, first)[0]
    return same_bits(sums, whole[1][:, 0]) and same_bits(queries[:, 0] + sums, whole[2][:, 0])


def check_channels(dim: int, size: int, num_threads: int) -> bool:
    """Try products with keys that lie channel by channel in blocks of ``size``.

    Returns whether sums over the channels of each block give the bits of the products.

    Raises:
        PlanError: a row's bits depend on how many rows are multiplied.
    """
    with threads(num_threads):
        found = [_channels_are_steady(dim, size, n * KEY_BLOCK, skip) for n in BLOCKS for skip in (0, KEY_BLOCK)]
    return all(found)


def _channels_are_steady(dim: int, size: int, width: int, skip: int) -> bool:
    """Two requests, the second of two heads, ``width`` columns from ``skip`` on."""
    most, blocks = COUNTS[-1], -(-(skip + width) // size)
    queries, channels = random_row(2, most, dim), random_row(2, blocks, 2, dim, size)
    keys = channels[:, :, 1].transpose(1, 2).flatten(2)[:, :, skip : skip + width]
    whole = torch.bmm(queries, keys)
    for n in COUNTS[:-1]:
        if not same_bits(torch.bmm(queries[:, :n], keys), whole[:, :n]):
            raise moved(
                f"attention of heads of {dim} over {width} keys in blocks of {size}", f"{n} and {most} rows differ"
            )
    listed = torch.arange(channels.numel() // size).view(2, blocks, 2, dim)[:, :, 1].reshape(-1)
    scales, begins = queries[:, :1].expand(2, blocks, dim).reshape(-1), torch.arange(0, len(listed), dim)
    sums = torch._embedding_bag_forward_only(channels.view(-1, size), listed, begins, False, 0, False, scales)[0]
    return same_bits(sums.view(2, -1)[:, skip : skip + width], whole[:, 0])


def check_paged(op: Any, request: PagedAttentionRequest, num_threads: int) -> None:
    """Raise PlanError when a row's bits depend on the rows it shares a step with."""
    shape = (_blocks(request.block_size), request.block_size, request.kv_heads, request.head_dim)
    cache = op.arranged({name: random_row(*shape) for name in ("key", "value")})
    query = random_row(ROWS, request.q_heads, request.head_dim)

    def run(start: int, end: int) -> torch.Tensor:
        attended: torch.Tensor = op.run(query[start:end], cache, op.plan(_step(request.block_size, start, end)))
        return attended

    _compare(run, f"attention of {request.q_heads} heads of {request.head_dim}", num_threads)


def check_sparse(op: Any, request: SparseAttentionRequest, num_threads: int) -> None:
    """The same for attention over a window and entries; rows of a block that is not causal belong together."""
    if not request.causal:
        return
    size, dim = request.block_size, request.head_dim
    cache = {"kv": random_row(_blocks(size), size, dim)}
    entries = {"kv": random_row(_blocks(size), size // request.rate, dim)} if request.rate else None
    query, sinks = random_row(ROWS, request.heads, dim), random_row(request.heads)
    chosen = torch.full((ROWS, request.chosen), -1)
    for row in range(ROWS):
        seen = min((row + 1) // max(request.rate, 1), request.chosen)
        chosen[row, :seen] = torch.arange(seen)

    def run(start: int, end: int) -> torch.Tensor:
        layout = _step(size, start, end)
        plan = op.plan(layout, layout if request.rate else None)
        picked = chosen[start:end] if request.chosen else None
        attended: torch.Tensor = op.run(query[start:end], cache, entries, plan, sinks, picked)
        return attended

    _compare(run, f"sparse attention of {request.heads} heads of {dim}", num_threads)


def check_index(op: Any, request: IndexTopKRequest, num_threads: int) -> None:
    """The same for the choice of entries: equal scores would hide a moved bit, so that only gross faults show here."""
    size = request.block_size
    cache = {"key": random_row(_blocks(size), size // request.rate, request.head_dim)}
    query, weights = random_row(ROWS, request.heads, request.head_dim), random_row(ROWS, request.heads)

    def run(start: int, end: int) -> torch.Tensor:
        plan = op.plan(_step(size, start, end))
        chosen: torch.Tensor = op.run(query[start:end], weights[start:end], cache, plan)
        return chosen

    _compare(run, f"index of {request.heads} heads of {request.head_dim}", num_threads)


def _blocks(block_size: int) -> int:
    return -(-ROWS // block_size) + 1


def _step(block_size: int, start: int, end: int) -> StepLayout:
    """Rows from position ``start`` to ``end`` of one request."""
    table = torch.arange(1, _blocks(block_size), dtype=torch.int32)[None]
    return layout_of(table, block_size, [end - start], [end])


def _compare(run: Callable[[int, int], torch.Tensor], what: str, num_threads: int) -> None:
    with threads(num_threads):
        whole = run(0, ROWS)
        for position in (0, ROWS // 2, ROWS - 1):
            if not same_bits(run(position, position + 1)[0], whole[position]):
                raise moved(what, f"the row at position {position} alone and among {ROWS} rows differ")
