"""The host's pooling against the reference's: the same steps leave the same caches."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import reference_support
import torch
from cpu_support import normal, operator
from reference_support import layout

from deepinfer_core.api import CompressRequest, StepLayout

EPSILON = 2.0**-24
DIM, BLOCK, TOKENS = 16, 16, 45
KINDS = [(4, True), (16, False), (2, False), (8, True)]


def request(rate: int, overlap: bool, **changes: Any) -> CompressRequest:
    fields: dict[str, Any] = {
        "cache_group": "tail", "entry_group": "entries", "entry": "kv", "head_dim": DIM, "rate": rate,
        "overlap": overlap, "dtype": "float32", "cache_dtype": "float32", "eps": 1e-6, "rotary_dim": 4, "theta": 1e4,
        "max_positions": 256, "block_size": BLOCK,
    }  # fmt: skip
    return CompressRequest(**(fields | changes))


class Pair:
    """The operator and the reference, each with caches of its own, full of NaN."""

    def __init__(self, r: CompressRequest, blocks: int) -> None:
        self.width = r.head_dim * (2 if r.overlap else 1)
        self.rate = r.rate
        self.ops = [operator(r), reference_support.operator(r)]
        nan = float("nan")
        self.caches = [
            (
                {name: torch.full((blocks, BLOCK, self.width), nan) for name in ("value", "score")},
                {"kv": torch.full((blocks, BLOCK // r.rate, DIM), nan)},
            )
            for _ in self.ops
        ]

    def step(self, tail: StepLayout, entry: StepLayout, seed: int) -> None:
        rows = len(tail.positions)
        # Slices of one projection, as the model has them.
        value, gate = normal(rows, 2 * self.width, seed=seed).split(self.width, 1)
        bias, norm = normal(self.rate, self.width, seed=7), normal(DIM, seed=8)
        for op, (tails, entries) in zip(self.ops, self.caches, strict=True):
            op.run(value, gate, tails, entries, op.plan(tail, entry), bias, norm)

    def check(self) -> None:
        """Tail rows bit for bit; entries within sums of at most 16 weights, a norm over DIM and a rotation."""
        (tail, entries), (wanted_tail, wanted_entries) = self.caches
        for name in tail:
            assert torch.equal(tail[name].nan_to_num(99), wanted_tail[name].nan_to_num(99))
        assert torch.equal(entries["kv"].isnan(), wanted_entries["kv"].isnan())
        found, wanted = entries["kv"].nan_to_num(0), wanted_entries["kv"].nan_to_num(0)
        assert torch.allclose(found, wanted, rtol=0, atol=8 * (16 + DIM) * EPSILON)


def part(whole: StepLayout, start: int, end: int) -> StepLayout:
    return attrs.evolve(
        whole,
        cu_seqlens=torch.tensor([0, end - start], dtype=torch.int32),
        seq_lens=torch.tensor([end], dtype=torch.int32),
        positions=whole.positions[start:end],
        slot_mapping=whole.slot_mapping[start:end],
        host_query_lens=whole.host_query_lens * 0 + (end - start),
        host_seq_lens=whole.host_seq_lens * 0 + end,
        max_query_len=end - start,
        max_seq_len=end,
    )


@pytest.mark.parametrize(("rate", "overlap"), KINDS)
@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 16, 45])
def test_every_chunking_equals_the_reference(rate: int, overlap: bool, chunk: int) -> None:
    tail, blocks = layout([TOKENS], [TOKENS], BLOCK, seed=1)
    entry, _ = layout([TOKENS], [TOKENS], BLOCK, seed=2)
    pair = Pair(request(rate, overlap), blocks)
    for start in range(0, TOKENS, chunk):
        end = min(start + chunk, TOKENS)
        pair.step(part(tail, start, end), part(entry, start, end), seed=start)
    pair.check()
    assert pair.caches[0][1]["kv"].isfinite().any()


@pytest.mark.parametrize(("rate", "overlap"), KINDS)
def test_several_requests_in_one_step(rate: int, overlap: bool) -> None:
    tail, blocks = layout([9, 0, 33, 16], [9, 5, 33, 16], BLOCK)
    pair = Pair(request(rate, overlap), blocks)
    pair.step(tail, tail, seed=3)
    pair.check()


def test_no_rows_write_nothing() -> None:
    nothing, _ = layout([], [], BLOCK)
    pair = Pair(request(4, True), 3)
    pair.step(nothing, nothing, seed=3)
    assert all(tensor.isnan().all() for cache in pair.caches[0] for tensor in cache.values())


def test_a_redirected_step_reads_the_rows_that_are_there() -> None:
    whole, blocks = layout([16], [16], BLOCK)
    pair = Pair(request(4, True), blocks)
    pair.step(whole, whole, seed=3)
    last = part(whole, 15, 16)
    last = attrs.evolve(last, slot_mapping=last.positions % BLOCK)
    pair.step(last, last, seed=9)
    pair.check()


@pytest.mark.parametrize("format", ["fp8:e4m3", "fp4:e2m1"])
def test_entries_are_rounded_when_asked(format: str) -> None:
    """A difference in the last bit may fall on the other side of a rounding: almost all entries are equal."""
    rounding = {"qdq": format, "qdq_channels": DIM, "qdq_group": DIM, "hadamard": format == "fp4:e2m1"}
    whole, blocks = layout([256], [256], BLOCK)
    pair = Pair(request(4, True, **rounding), blocks)
    pair.step(whole, whole, seed=3)
    found, wanted = (cache[1]["kv"].nan_to_num(0) for cache in pair.caches)
    assert (found != wanted).double().mean() < 0.01
    plain = Pair(request(4, True), blocks)
    plain.step(whole, whole, seed=3)
    assert (found != plain.caches[0][1]["kv"].nan_to_num(0)).double().mean() > 0.5
