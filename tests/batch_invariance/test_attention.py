"""Attention on the host: every row in every kind of step it can be computed in."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
from deepinfer_batch_invariance.key_lists import KEY_BLOCK, room
from deepinfer_batch_invariance.layouts import layout_of
from deepinfer_batch_invariance.self_check import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from invariance import normal, operator, reference_operator

from deepinfer_core.api import (
    CompressRequest,
    IndexTopKRequest,
    OpRequest,
    PagedAttentionRequest,
    SparseAttentionRequest,
    StepLayout,
)

BLOCK, RATE = 16, 4
DEMANDS = frozenset({"batch_invariant", "kv_layout:paged"})
FLOAT32: dict[str, Any] = {"dtype": "float32", "cache_dtype": "float32", "block_size": BLOCK, "demands": DEMANDS}
Run = Callable[[Any, StepLayout, torch.Tensor], torch.Tensor]
"""``(operator, layout, numbers of the rows among all) -> results``."""


class Requests:
    """Requests whose whole contexts are cached, and steps over any rows of theirs."""

    def __init__(self, lengths: Sequence[int], seed: int, block_size: int = BLOCK) -> None:
        self.lengths = list(lengths)
        self.block_size = block_size
        self.blocks = max(-(-length // block_size) for length in lengths)
        order = torch.randperm(len(lengths) * self.blocks, generator=torch.Generator().manual_seed(seed)) + 1
        self.table = order.view(len(lengths), self.blocks).to(torch.int32)
        self.num_blocks = len(lengths) * self.blocks + 1
        self.starts = [sum(self.lengths[:i]) for i in range(len(lengths))]
        self.rows = sum(self.lengths)

    def step(self, parts: Sequence[tuple[int, int, int]]) -> tuple[StepLayout, torch.Tensor]:
        """A step of (request, first position, end) parts, and the numbers of its rows."""
        layout = layout_of(
            self.table[[request for request, _, _ in parts]],
            self.block_size,
            [end - start for _, start, end in parts],
            [end for _, _, end in parts],
        )
        numbers = [torch.arange(self.starts[r] + start, self.starts[r] + end) for r, start, end in parts]
        return layout, torch.cat(numbers)

    def steps(self, seed: int) -> list[list[tuple[int, int, int]]]:
        """Decode steps, drafts beside prompts, prompts in chunks, one row, all requests in another order."""
        source = random.Random(seed)
        every = list(range(len(self.lengths)))
        found = [[(r, self.lengths[r] - 1, self.lengths[r]) for r in source.sample(every, len(every))]]
        for _ in range(6):
            parts = []
            for request in source.sample(every, source.randrange(1, len(every) + 1)):
                end = source.randrange(1, self.lengths[request] + 1)
                rows = source.choice((1, 1, 2, 6, 9, 40, end))
                parts.append((request, max(0, end - rows), end))
            found.append(parts)
        return [*found, [(source.choice(every), 0, 1)]]


def paged(**changes: Any) -> tuple[OpRequest, Callable[[Requests], Run]]:
    shape = {"cache_group": "full", "q_heads": 6, "kv_heads": 2, "head_dim": 24, "scale": 0.2, **changes}
    request = PagedAttentionRequest(**(shape | FLOAT32))
    return request, over_pages(request)


def over_pages(request: PagedAttentionRequest) -> Callable[[Requests], Run]:
    def over(requests: Requests) -> Run:
        cache = {
            name: normal(requests.num_blocks, request.block_size, request.kv_heads, request.head_dim, seed=seed)
            for seed, name in enumerate(("key", "value"))
        }
        query = normal(requests.rows, request.q_heads, request.head_dim, seed=5)
        return lambda op, layout, rows: op.run(query[rows], cache, op.plan(layout))

    return over


def transposed(**changes: Any) -> tuple[OpRequest, Callable[[Requests], Run]]:
    """The same over blocks whose keys lie by channel."""
    given = {"demands": {"batch_invariant", "kv_layout:transposed_keys"}, "block_size": 32, **changes}
    request, _ = paged()
    request = attrs.evolve(request, **given)  # type: ignore[arg-type]

    def over(requests: Requests) -> Run:
        r: Any = request
        keys = normal(requests.num_blocks, r.block_size, r.kv_heads, r.head_dim, seed=0).permute(0, 2, 3, 1)
        values = normal(requests.num_blocks, r.block_size, r.kv_heads, r.head_dim, seed=1).transpose(1, 2)
        cache = {"key": keys.contiguous(), "value": values.contiguous()}
        query = normal(requests.rows, r.q_heads, r.head_dim, seed=5)
        return lambda op, layout, rows: op.run(query[rows], cache, op.plan(layout))

    return request, over


def sparse(rate: int, chosen: int) -> tuple[OpRequest, Callable[[Requests], Run]]:
    entry = "entries" if rate else ""
    request = SparseAttentionRequest(
        cache_group="window",
        entry_group=entry,
        heads=5,
        head_dim=24,
        scale=0.2,
        window=21,
        rate=rate,
        chosen=chosen,
        **FLOAT32,
    )

    def over(requests: Requests) -> Run:
        cache = {"kv": normal(requests.num_blocks, BLOCK, 24, seed=1)}
        entries = {"kv": normal(requests.num_blocks, BLOCK // rate, 24, seed=2)} if rate else None
        query, sinks = normal(requests.rows, 5, 24, seed=3), normal(5, seed=4)
        picks = torch.full((requests.rows, max(chosen, 1)), -1)
        source = random.Random(0)
        for request_number, length in enumerate(requests.lengths):
            for position in range(length):
                seen = (position + 1) // max(rate, 1)
                picked = sorted(source.sample(range(seen), min(seen, chosen)))
                picks[requests.starts[request_number] + position, : len(picked)] = torch.tensor(picked)

        def run(op: Any, layout: StepLayout, rows: torch.Tensor) -> torch.Tensor:
            plan = op.plan(layout, layout if rate else None)
            result: torch.Tensor = op.run(query[rows], cache, entries, plan, sinks, picks[rows] if chosen else None)
            return result

        return run

    return request, over


def index_topk() -> tuple[OpRequest, Callable[[Requests], Run]]:
    request = IndexTopKRequest(cache_group="index", heads=5, head_dim=24, top_k=7, rate=RATE, scale=0.3, **FLOAT32)

    def over(requests: Requests) -> Run:
        cache = {"key": normal(requests.num_blocks, BLOCK // RATE, 24, seed=1)}
        query, weights = normal(requests.rows, 5, 24, seed=2), normal(requests.rows, 5, seed=3)
        return lambda op, layout, rows: op.run(query[rows], weights[rows], cache, op.plan(layout))

    return request, over


def compress(overlap: bool, qdq: bool) -> tuple[OpRequest, Callable[[Requests], Run]]:
    width, channels = 64, 48
    rounded: dict[str, Any] = {"qdq": "fp8:e4m3", "qdq_channels": channels, "qdq_group": 16} if qdq else {}
    request = CompressRequest(
        cache_group="tail",
        entry_group="entries",
        entry="kv",
        head_dim=width,
        rate=RATE,
        overlap=overlap,
        eps=1e-6,
        rotary_dim=16,
        theta=1e4,
        max_positions=1024,
        **rounded,
        **FLOAT32,
    )

    def over(requests: Requests) -> Run:
        wide = width * (2 if overlap else 1)
        value, gate = normal(requests.rows, wide, seed=1), normal(requests.rows, wide, seed=2)
        bias, norm = normal(RATE, wide, seed=3), normal(width, seed=4)
        everything = requests.step([(r, 0, length) for r, length in enumerate(requests.lengths)])

        def run(op: Any, layout: StepLayout, rows: torch.Tensor) -> torch.Tensor:
            """What lies in each row's entry once its window has closed; zeros before that."""
            tail = {name: torch.zeros(requests.num_blocks, BLOCK, wide) for name in ("value", "score")}
            entries = {"kv": torch.zeros(requests.num_blocks, BLOCK // RATE, width)}
            before, all_rows = everything
            op.run(value[all_rows], gate[all_rows], tail, entries, op.plan(before, before), bias, norm)
            entries["kv"].zero_()
            op.run(value[rows], gate[rows], tail, entries, op.plan(layout, layout), bias, norm)
            closed = layout.positions % RATE == RATE - 1
            where = torch.div(layout.slot_mapping, RATE, rounding_mode="floor")
            return torch.where(closed[:, None], entries["kv"].view(-1, width)[where], torch.zeros(()))

        return run

    return request, over


CASES: dict[str, tuple[Any, str]] = {
    "paged": (paged(), "paged"),
    "window": (paged(window=13), "paged"),
    "one head a key": (paged(q_heads=2), "paged"),
    "transposed": (transposed(), "paged_transposed"),
    "transposed, window": (transposed(window=13, block_size=64), "paged_transposed"),
    "transposed, wide window": (transposed(window=100, block_size=48), "paged_transposed"),
    "sparse": (sparse(RATE, 0), "sparse"),
    "sparse, chosen": (sparse(RATE, 7), "sparse"),
    "window and sink": (sparse(0, 0), "sparse"),
    "index_topk": (index_topk(), "index_topk"),
    "compress": (compress(False, False), "compress"),
    "compress, overlap, rounded": (compress(True, True), "compress"),
}


def check(op: Any, over: Callable[[Requests], Run], lengths: Sequence[int], seed: int, block_size: int = BLOCK) -> None:
    requests = Requests(lengths, seed, block_size)
    run = over(requests)
    layout, rows = requests.step([(r, 0, length) for r, length in enumerate(requests.lengths)])
    whole = run(op, layout, rows)
    for parts in requests.steps(seed):
        layout, rows = requests.step(parts)
        for found, row in zip(run(op, layout, rows), rows.tolist(), strict=True):
            assert same_bits(found, whole[row]), f"row {row} of requests of {lengths} moved in the step {parts}"


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=4)
@given(lengths=st.lists(st.integers(1, 150), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_rows_alone_and_together(name: str, lengths: list[int], seed: int) -> None:
    (request, over), provider = CASES[name]
    check(operator(request, f"batch_invariance:{provider}"), over, lengths, seed, request.block_size)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_long_contexts_with_one_and_two_threads(name: str, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        (request, over), provider = CASES[name]
        check(operator(request, f"batch_invariance:{provider}", threads), over, [600, 33, 300], 1, request.block_size)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("lengths", [[1], [70, 3, 40]])
def test_equals_the_reference(name: str, lengths: list[int]) -> None:
    (request, over), provider = CASES[name]
    requests = Requests(lengths, 1, request.block_size)
    layout, rows = requests.step([(r, 0, length) for r, length in enumerate(lengths)])
    run = over(requests)
    found = run(operator(request, f"batch_invariance:{provider}"), layout, rows)
    if provider == "paged_transposed":  # the reference reads pages
        request = attrs.evolve(request, demands=DEMANDS)
        run = over_pages(request)(requests)
    wanted = run(reference_operator(request), layout, rows)
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["paged", "sparse", "sparse, chosen", "window and sink"])
def test_what_lies_behind_a_row_is_not_read(name: str) -> None:
    """Cache rows of later tokens, and blocks of others, hold NaN."""
    (request, over), provider = CASES[name]
    op = operator(request, f"batch_invariance:{provider}")
    requests = Requests([40, 40], 3)
    run = over(requests)
    layout, rows = requests.step([(0, 0, 20)])
    clean = run(op, layout, rows)
    cells = [cell.cell_contents for cell in run.__closure__ or ()]  # type: ignore[attr-defined]
    caches = [c for c in cells if isinstance(c, dict)]
    assert caches
    for cache in caches:
        for tensor in cache.values():
            per_block = tensor.shape[1]
            keep = -(-20 * per_block // BLOCK)
            mine = requests.table[0].long()
            flat = tensor.view(-1, *tensor.shape[2:])
            kept = flat[mine[0] * per_block : mine[0] * per_block + min(keep, per_block)].clone()
            rest = keep - len(kept)
            second = flat[mine[1] * per_block : mine[1] * per_block + rest].clone()
            tensor.fill_(float("nan"))
            flat[mine[0] * per_block : mine[0] * per_block + len(kept)] = kept
            flat[mine[1] * per_block : mine[1] * per_block + rest] = second
    assert torch.equal(run(op, layout, rows), clean)


@given(keys=st.integers(1, 5000))
def test_room_depends_on_the_keys_and_wastes_little(keys: int) -> None:
    import numpy as np

    (alone,) = room(np.array([keys]))
    assert room(np.array([keys, 1, 4999]))[0] == alone
    assert keys <= alone < keys + max(KEY_BLOCK, keys / 8 + 1)
