"""Pooling of tokens into entries: against the one-shot formula, for every way of cutting the tokens into steps."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
import torch
from reference_support import layout, operator

from deepinfer_core.api import CompressRequest, QuantiseDequantiseRequest, StepLayout

DIM, ROTARY, BLOCK, THETA, EPS = 8, 4, 16, 1e4, 1e-6


def request(rate: int, overlap: bool, **changes: Any) -> CompressRequest:
    fields: dict[str, Any] = {
        "cache_group": "tail",
        "entry_group": "entries",
        "entry": "kv",
        "head_dim": DIM,
        "rate": rate,
        "overlap": overlap,
        "dtype": "float32",
        "cache_dtype": "float32",
        "eps": EPS,
        "rotary_dim": ROTARY,
        "theta": THETA,
        "max_positions": 256,
        "block_size": BLOCK,
    }
    return CompressRequest(**(fields | changes))


@attrs.define
class Data:
    value: torch.Tensor
    gate: torch.Tensor
    bias: torch.Tensor
    norm: torch.Tensor


def data(rate: int, overlap: bool, tokens: int, seed: int = 0) -> Data:
    generator = torch.Generator().manual_seed(seed)
    width = DIM * (2 if overlap else 1)
    rows = [torch.randn(n, width, generator=generator) for n in (tokens, tokens, rate)]
    return Data(rows[0], rows[1] * 2, rows[2], torch.rand(DIM, generator=generator) + 0.5)


def one_shot(d: Data, rate: int, overlap: bool) -> torch.Tensor:
    """Every complete window, token by token and channel by channel, in Python's own numbers."""
    entries = []
    for w in range(len(d.value) // rate):
        pooled = []
        for channel in range(DIM):
            items = []
            if overlap and w:
                items += [(j, channel) for j in range(rate * (w - 1), rate * w)]
            shift = DIM if overlap else 0
            items += [(j, channel + shift) for j in range(rate * w, rate * (w + 1))]
            scores = [float(d.gate[j, c]) + float(d.bias[j % rate, c]) for j, c in items]
            weights = [math.exp(s - max(scores)) for s in scores]
            total = sum(weights)
            pooled.append(sum(x / total * float(d.value[j, c]) for x, (j, c) in zip(weights, items, strict=True)))
        spread = math.sqrt(sum(x * x for x in pooled) / DIM + EPS)
        normed = [x / spread * float(d.norm[c]) for c, x in enumerate(pooled)]
        for pair in range(ROTARY // 2):
            angle = rate * w * THETA ** (-2 * pair / ROTARY)
            at = DIM - ROTARY + 2 * pair
            a, b = normed[at], normed[at + 1]
            normed[at] = a * math.cos(angle) - b * math.sin(angle)
            normed[at + 1] = a * math.sin(angle) + b * math.cos(angle)
        entries.append(normed)
    return torch.tensor(entries)


def part(whole: StepLayout, start: int, end: int) -> StepLayout:
    """Rows ``start:end`` of a one-request layout, as a step of their own."""
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


def caches(blocks: int, rate: int, width: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Tail and entries full of NaN: what is read was written."""
    nan = float("nan")
    tail = {name: torch.full((blocks, BLOCK, width), nan) for name in ("value", "score")}
    return tail, {"kv": torch.full((blocks, BLOCK // rate, DIM), nan)}


def entries_of(cache: dict[str, torch.Tensor], table: torch.Tensor, count: int) -> torch.Tensor:
    return cache["kv"][table.long()].flatten(0, 1)[:count]


KINDS = [(4, True), (16, False), (2, False), (8, True)]


@pytest.mark.parametrize(("rate", "overlap"), KINDS)
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 45])
def test_every_chunking_gives_the_one_shot_entries(rate: int, overlap: bool, chunk: int) -> None:
    tokens = 45
    d, op = data(rate, overlap, tokens), operator(request(rate, overlap))
    whole, blocks = layout([tokens], [tokens], BLOCK, seed=1)
    other, _ = layout([tokens], [tokens], BLOCK, seed=2)
    tail, entries = caches(blocks, rate, d.value.shape[1])
    for start in range(0, tokens, chunk):
        end = min(start + chunk, tokens)
        plan = op.plan(part(whole, start, end), part(other, start, end))
        op.run(d.value[start:end], d.gate[start:end], tail, entries, plan, d.bias, d.norm)
    wanted = one_shot(d, rate, overlap)
    found = entries_of(entries, other.block_table[0], len(wanted))
    assert torch.allclose(found, wanted, atol=2e-6)
    assert entries_of(entries, other.block_table[0], 99)[len(wanted) :].isnan().all()


@pytest.mark.parametrize(("rate", "overlap"), KINDS)
def test_several_requests_in_one_step(rate: int, overlap: bool) -> None:
    lengths = [9, 0, 33, 16]
    op = operator(request(rate, overlap))
    step, blocks = layout(lengths, lengths, BLOCK)
    texts = [data(rate, overlap, n, seed=i) for i, n in enumerate(lengths)]
    tail, entries = caches(blocks, rate, texts[0].value.shape[1])
    first = texts[0]
    value, gate = (torch.cat([getattr(t, name) for t in texts]) for name in ("value", "gate"))
    op.run(value, gate, tail, entries, op.plan(step, step), first.bias, first.norm)
    for index, text in enumerate(texts):
        wanted = one_shot(attrs.evolve(text, bias=first.bias, norm=first.norm), rate, overlap)
        if len(wanted):
            assert torch.allclose(entries_of(entries, step.block_table[index], len(wanted)), wanted, atol=2e-6)


def test_rerun_rows_replace_what_a_rejected_guess_left() -> None:
    d, wrong, op = data(4, True, 16), data(4, True, 16, seed=9), operator(request(4, True))
    whole, blocks = layout([16], [16], BLOCK)
    tail, entries = caches(blocks, 4, 2 * DIM)
    for source, start, end in ((d, 0, 6), (wrong, 6, 13), (d, 6, 16)):
        plan = op.plan(part(whole, start, end), part(whole, start, end))
        op.run(source.value[start:end], source.gate[start:end], tail, entries, plan, d.bias, d.norm)
    assert torch.allclose(entries_of(entries, whole.block_table[0], 4), one_shot(d, 4, True), atol=2e-6)


def test_a_redirected_step_reads_the_rows_that_are_there() -> None:
    """Slots in the null block: the last token's row is that of the shared block, and nothing shared changes."""
    d, op = data(4, True, 16), operator(request(4, True))
    whole, blocks = layout([16], [16], BLOCK)
    tail, entries = caches(blocks, 4, 2 * DIM)
    op.run(d.value, d.gate, tail, entries, op.plan(whole, whole), d.bias, d.norm)
    before = {name: tensor[1:].clone() for name, tensor in (tail | entries).items()}
    last = part(whole, 15, 16)
    last = attrs.evolve(last, slot_mapping=last.positions % BLOCK)
    op.run(d.value[15:] * 0, d.gate[15:], tail, entries, op.plan(last, last), d.bias, d.norm)
    assert all(torch.equal(before[name], tensor[1:]) for name, tensor in (tail | entries).items())
    assert torch.allclose(entries["kv"][0, 3], one_shot(d, 4, True)[3], atol=2e-6)


def test_no_rows_and_no_closing_window_write_no_entry() -> None:
    op = operator(request(4, True))
    d = data(4, True, 3)
    step, blocks = layout([3], [3], BLOCK)
    tail, entries = caches(blocks, 4, 2 * DIM)
    op.run(d.value, d.gate, tail, entries, op.plan(step, step), d.bias, d.norm)
    nothing, _ = layout([], [], BLOCK)
    op.run(d.value[:0], d.gate[:0], tail, entries, op.plan(nothing, nothing), d.bias, d.norm)
    assert entries["kv"].isnan().all()


def test_entries_are_rounded_when_asked() -> None:
    """Rounding is the last thing that happens to an entry: after its norm and its rotation."""
    rounding = {"qdq": "fp4:e2m1", "qdq_channels": DIM, "qdq_group": DIM, "hadamard": True}
    d, op = data(4, True, 16), operator(request(4, True, **rounding))
    whole, blocks = layout([16], [16], BLOCK)
    tail, entries = caches(blocks, 4, 2 * DIM)
    op.run(d.value, d.gate, tail, entries, op.plan(whole, whole), d.bias, d.norm)
    qdq = operator(
        QuantiseDequantiseRequest(format="fp4:e2m1", width=DIM, channels=DIM, group=DIM, dtype="float32", hadamard=True)
    )
    wanted = qdq.run(one_shot(d, 4, True))
    assert torch.allclose(entries_of(entries, whole.block_table[0], 4), wanted, atol=1e-5)
    assert not torch.allclose(wanted, one_shot(d, 4, True), atol=1e-2)
