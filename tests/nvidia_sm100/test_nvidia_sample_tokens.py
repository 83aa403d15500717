"""Temperature, top-k, top-p and draw in one region, against the reference's stages one after the other."""

from __future__ import annotations

import random
import secrets
from typing import Any

import pytest
import torch
import triton.language as tl
from deepinfer_nvidia_sm100.ops import band, chain, lists, race, settle, shortlist, weigh
from deepinfer_nvidia_sm100.ops.states import OPEN
from gpu_support import ON_GPU, here, operator
from reference_support import batch
from reference_support import operator as reference
from test_nvidia_cuts import ROWS

from deepinfer_core.api import SampleTokensRequest, SamplingRequest

SEED = secrets.randbits(31)
VOCAB = 129280 if ON_GPU else 9001
STAGES = frozenset({"temperature", "top_k", "top_p"})


def parameters(source: random.Random, width: int, count: int) -> list[dict[str, Any]]:
    return [
        {
            "seed": source.getrandbits(64),
            "child": source.randrange(5),
            "position": source.choice([0, 3, 1000, 2**31, 2**40]),
            "temperature": source.choice([0.0, 1e-6, 0.3, 0.7, 1.0, 1.0, 1.7, 4.0]),
            "top_k": source.choice([0, 0, 1, 5, 50, source.randrange(1, 900), source.randrange(1, width), width]),
            "top_p": source.choice([1.0, 0.9, 0.5, 0.95, source.random(), 0.999, 0.0, -1.0]),
        }
        for _ in range(count)
    ]


def by_parts(logits: torch.Tensor, step: Any, stages: frozenset[str]) -> torch.Tensor:
    logits = logits[:, : step.token_limit]
    for stage in ("temperature", "top_k", "top_p", "draw"):
        if stage in stages or stage == "draw":
            logits = reference(SamplingRequest(stage=stage, vocab_size=logits.shape[1])).run(logits, step)
    return logits


def drawn(logits: torch.Tensor, step: Any, stages: frozenset[str] = STAGES) -> torch.Tensor:
    given = here(logits.clone())
    step.active = stages
    found: torch.Tensor = operator(SampleTokensRequest(vocab_size=logits.shape[1])).run(given, here(step)).cpu()
    assert torch.equal(given.cpu().view(torch.int32), logits.view(torch.int32)), "the logits stay as they are"
    return found


@pytest.mark.parametrize(
    ("kind", "width"), [*((kind, VOCAB) for kind in ROWS), *((kind, 1003) for kind in ("wide", "ties", "few"))]
)
def test_tokens_are_those_of_the_stages(kind: str, width: int) -> None:
    source, draw = random.Random(f"{SEED} {kind} {width}"), torch.Generator().manual_seed(SEED)
    rows = parameters(source, width, 24 if ON_GPU else 4)
    logits = torch.stack([ROWS[kind](source, draw, width) for _ in rows])
    step = batch(rows, width)
    found, expected = drawn(logits, step), by_parts(logits, step, STAGES)
    wrong = [(n, int(found[n]), int(expected[n]), row) for n, row in enumerate(rows) if found[n] != expected[n]]
    assert not wrong, f"seed {SEED}: {wrong}"


def states_left(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Of each call from now on, what was left to do for its rows after the kernel that settles them."""
    states: list[list[int]] = []
    plain = chain.settle_kernel

    class Seen:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*arguments: Any, **options: Any) -> None:
                plain[grid](*arguments, **options)
                states.append(arguments[4].flatten().tolist())

            return launch

    monkeypatch.setattr(chain, "settle_kernel", Seen())
    return states


@pytest.mark.parametrize("stages", [(), ("temperature",), ("top_k",), ("top_p",), ("top_k", "top_p")])
def test_a_stage_that_is_not_active_is_left_out(stages: tuple[str, ...]) -> None:
    source, draw = random.Random(SEED), torch.Generator().manual_seed(SEED)
    rows = parameters(source, 3000, 8)
    logits = torch.randn(8, 3000, generator=draw) * 2
    step = batch(rows, 3000)
    assert torch.equal(drawn(logits, step, frozenset(stages)), by_parts(logits, step, frozenset(stages)))


def test_broken_and_empty_rows_give_none_and_touch_no_other() -> None:
    source, draw = random.Random(SEED), torch.Generator().manual_seed(SEED)
    rows = [
        {**row, "temperature": temperature, "top_k": k, "top_p": p}
        for row in parameters(source, VOCAB, 1)
        for temperature, k, p in ((0.7, 50, 0.9), (1.0, 0, 1.0), (0.0, 0, 1.0), (1.0, 0, 0.9))
        for _ in range(4)
    ]
    logits = torch.randn(16, VOCAB, generator=draw) * 3
    logits[0::4, 77], logits[1::4, VOCAB - 1], logits[2::4] = float("nan"), float("inf"), -float("inf")
    step = batch(rows, VOCAB)
    found = drawn(logits, step)
    assert found.view(4, 4)[:, :3].eq(-1).all()
    assert torch.equal(found.view(4, 4)[:, 3], by_parts(logits, step, STAGES).view(4, 4)[:, 3])


def test_rows_are_drawn_alike_alone_and_together() -> None:
    source, draw = random.Random(SEED), torch.Generator().manual_seed(SEED)
    rows = parameters(source, VOCAB, 6)
    logits = torch.randn(6, VOCAB, generator=draw) * torch.tensor([0.2, 1.0, 2.0, 3.0, 3.0, 5.0])[:, None]
    together = drawn(logits, batch(rows, VOCAB))
    for n in range(6):
        assert drawn(logits[n : n + 1], batch(rows[n : n + 1], VOCAB)).tolist() == together[n : n + 1].tolist()


@pytest.mark.skipif(ON_GPU, reason="a compiled kernel has its sizes built in")
@pytest.mark.parametrize("lanes", [4, 60])
def test_lists_that_overflow_change_nothing(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(SEED)
    logits = torch.randn(4, 9000, generator=draw) * torch.tensor([0.3, 1.0, 2.0, 3.0])[:, None]
    rows = [{"seed": n, "temperature": 1.3, "top_p": p} for n, p in enumerate((0.9, 0.5, 0.99, 0.8))]
    step = batch(rows, 9000)
    expected = by_parts(logits, step, STAGES)
    monkeypatch.setattr(lists, "LANES", tl.constexpr(lanes))
    for module in (shortlist, band, settle):
        monkeypatch.setattr(module, "LANES", tl.constexpr(lanes))
    assert torch.equal(drawn(logits, step), expected)


@pytest.mark.skipif(ON_GPU, reason="a compiled kernel has its sizes built in")
@pytest.mark.parametrize(
    ("module", "name", "value", "left"),
    [
        (weigh, "NEAR", 2.0, True),
        (race, "DEVIATIONS", -40.0, True),
        (race, "DEVIATIONS", 40.0, False),
        (race, "FIELD", 8, True),
    ],
    ids=["sums decide nothing", "the sample is trusted too much", "the sample says nothing", "lists overflow"],
)
def test_a_race_that_is_not_decided_changes_nothing(
    module: Any, name: str, value: float, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(SEED)
    logits = torch.randn(8, 9000, generator=draw) * torch.tensor([0.0, 0.3, 1.0, 2.0] * 2)[:, None]
    logits[4:] = (logits[4:] * 2).round() / 2
    rows = [{"seed": SEED + n, "temperature": 1.3, "top_p": p} for n, p in enumerate((0.9, 0.5, 0.7, 0.8) * 2)]
    step = batch(rows, 9000)
    expected = by_parts(logits, step, STAGES)
    monkeypatch.setattr(module, name, tl.constexpr(value))
    states = states_left(monkeypatch)
    assert torch.equal(drawn(logits, step), expected)
    assert not left or OPEN.value in states[0], f"seed {SEED}: {states}"


def test_padding_is_never_drawn() -> None:
    draw = torch.Generator().manual_seed(SEED)
    logits = torch.randn(5, 4224, generator=draw)
    logits[:, 4170:] = 30.0
    logits[3, 4172] = float("nan")
    rows = [
        {"seed": n, "temperature": 1.3, "top_k": k, "top_p": p}
        for n, (k, p) in enumerate(((0, 1.0), (4170, 0.95), (7, 1.0), (0, 0.9), (4169, 1.0)))
    ]
    step = batch(rows, 4224, token_limit=4170)
    assert torch.equal(drawn(logits, step), by_parts(logits, step, STAGES))


def test_no_rows() -> None:
    assert drawn(torch.zeros(0, 40), batch([], 40)).shape == (0,)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (0, 0.8), (9, 0.7)])
def test_frequencies(top_k: int, top_p: float) -> None:
    """Chi-square over many seeds, against the distribution that the stages leave."""
    count, width = (20000, 40) if ON_GPU else (120, 16)
    row = torch.randn(width, generator=torch.Generator().manual_seed(SEED)) * 1.5
    rows = [{"seed": SEED * 100003 + n, "temperature": 0.8, "top_k": top_k, "top_p": top_p} for n in range(count)]
    step = batch(rows, width)
    kept = row[None].clone()
    one = batch(rows[:1], width)
    for stage in ("temperature", "top_k", "top_p"):
        kept = reference(SamplingRequest(stage=stage, vocab_size=width)).run(kept, one)
    expected = kept[0].double().softmax(0) * count
    found = drawn(row.expand(count, width).contiguous(), step)
    counts = torch.bincount(found, minlength=width).double()
    assert counts[expected == 0].sum() == 0
    real = expected > 5
    statistic = float(((counts - expected) ** 2 / expected)[real].sum())
    freedom = int(real.sum()) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5 + 5, f"seed {SEED}"


@pytest.mark.parametrize("scale", [0.2, 1.0, 2.0])
def test_flat_rows_are_read_twice_and_no_more(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums before those that lead the race decide who wins it."""
    width = 129280 if ON_GPU else 20000
    draw = torch.Generator().manual_seed(SEED)
    logits = torch.randn(3, width, generator=draw) * scale
    rows = [{"seed": n, "temperature": t, "top_p": p} for n, (t, p) in enumerate(((1.0, 0.9), (0.8, 0.95), (1.5, 0.6)))]
    step = batch(rows, width)
    states = states_left(monkeypatch)
    assert torch.equal(drawn(logits, step), by_parts(logits, step, STAGES))
    assert states == [[0, 0, 0]], f"seed {SEED}: no row was left open"


def test_more_than_131072_tokens_are_looked_at_in_larger_groups() -> None:
    logits = torch.randn(2, 140001, generator=torch.Generator().manual_seed(SEED)) * 2
    step = batch([{"seed": SEED, "top_k": 50, "temperature": 0.7}, {"seed": SEED, "top_k": 3, "top_p": 0.6}], 140001)
    assert torch.equal(drawn(logits, step), by_parts(logits, step, STAGES))
