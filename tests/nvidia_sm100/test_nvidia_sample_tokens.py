"""Temperature, top-k, top-p and draw in one region, against the reference's stages one after the other."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import triton.language as tl
from deepinfer_nvidia_sm100.ops import band, chain, levels, lists, race, settle, shortlist, weigh
from deepinfer_nvidia_sm100.ops.states import DONE, OPEN, RACED
from gpu_support import ON_GPU, here, operator
from reference_support import batch
from reference_support import operator as reference
from scipy.stats import chi2
from test_nvidia_cuts import ROWS
from toys.seeds import module_seed

from deepinfer_core.api import SampleTokensRequest, SamplingRequest

SEED = module_seed(__name__)
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


@pytest.fixture(params=[0, 96], ids=["levels", "no levels"])
def levelled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows are drawn, and as few."""
    monkeypatch.setattr(chain, "LEVELLED", request.param)


@pytest.mark.usefixtures("levelled")
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


def after(kernel: str, argument: int, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Of each call from now on, what an argument of a kernel holds after it."""
    found: list[torch.Tensor] = []
    plain = getattr(chain, kernel)

    class Seen:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*arguments: Any, **options: Any) -> None:
                plain[grid](*arguments, **options)
                found.append(arguments[argument].cpu().clone())

            return launch

    monkeypatch.setattr(chain, kernel, Seen())
    return found


@pytest.mark.parametrize("stages", [(), ("temperature",), ("top_k",), ("top_p",), ("top_k", "top_p")])
def test_a_stage_that_is_not_active_is_left_out(stages: tuple[str, ...]) -> None:
    source, draw = random.Random(SEED), torch.Generator().manual_seed(SEED)
    rows = parameters(source, 3000, 8)
    logits = torch.randn(8, 3000, generator=draw) * 2
    step = batch(rows, 3000)
    assert torch.equal(drawn(logits, step, frozenset(stages)), by_parts(logits, step, frozenset(stages)))


@pytest.mark.usefixtures("levelled")
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
        (race, "DEVIATIONS", -400.0, True),
        (race, "DEVIATIONS", 40.0, False),
        (race, "FIELD", 8, True),
        (levels, "LEAST", 1e-3, False),
        (levels, "LEAST", 5.0, False),
    ],
    ids=[
        "sums decide nothing",
        "the sample is trusted too much",
        "the sample says nothing",
        "lists overflow",
        "levels are too low",
        "levels are too high",
    ],
)
def test_a_race_that_is_not_decided_changes_nothing(
    module: Any, name: str, value: float, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, tl.constexpr(value))
    monkeypatch.setattr(chain, "LEVELLED", 0 if module is levels else 96)  # levels settle most of these rows before
    states = after("settle_kernel", 4, monkeypatch)
    draw = torch.Generator().manual_seed(SEED)
    for attempt in range(4):  # the rows of one draw may all be settled in spite of it
        logits = torch.randn(8, 9000, generator=draw) * torch.tensor([0.0, 0.3, 1.0, 2.0] * 2)[:, None]
        logits[4:] = (logits[4:] * 2).round() / 2
        seeds = (SEED + 8 * attempt + n for n in range(8))
        rows = [
            {"seed": seed, "temperature": 1.3, "top_p": p}
            for seed, p in zip(seeds, (0.9, 0.5, 0.7, 0.8) * 2, strict=True)
        ]
        step = batch(rows, 9000)
        assert torch.equal(drawn(logits, step), by_parts(logits, step, STAGES))
        open_rows = OPEN.value in states[-1].flatten().tolist()
        if open_rows or not left:
            break
    assert not left or open_rows, f"seed {SEED}: {states}"


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
    assert statistic <= (chi2.isf(1e-9, freedom) if freedom else 5), f"seed {SEED}"


@pytest.mark.usefixtures("levelled")
@pytest.mark.parametrize("scale", [0.2, 1.0, 2.0])
def test_flat_rows_are_read_twice_and_no_more(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums before those that lead the race decide who wins it."""
    width = 129280 if ON_GPU else 20000
    draw = torch.Generator().manual_seed(SEED)
    logits = torch.randn(3, width, generator=draw) * scale
    rows = [{"seed": n, "temperature": t, "top_p": p} for n, (t, p) in enumerate(((1.0, 0.9), (0.8, 0.95), (1.5, 0.6)))]
    step = batch(rows, width)
    states = after("settle_kernel", 4, monkeypatch)
    assert torch.equal(drawn(logits, step), by_parts(logits, step, STAGES))
    assert states[0].flatten().tolist() == [DONE.value] * 3, f"seed {SEED}: no row was left open"


def test_most_flat_rows_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the leading tokens do not stay; of some that do, three others in their four say nothing."""
    width, count = (129280, 256) if ON_GPU else (8192, 40)
    draw = torch.Generator().manual_seed(SEED)
    logits = torch.randn(count, width, generator=draw) * torch.tensor([1.0, 2.0]).repeat(count // 2)[:, None]
    step = batch([{"seed": SEED + n, "temperature": 0.8, "top_p": 0.9} for n in range(count)], width)
    monkeypatch.setattr(chain, "LEVELLED", 0)
    states = after("race_kernel", 9, monkeypatch)
    assert torch.equal(drawn(logits, step), by_parts(logits, step, STAGES))
    again = int((states[0] == RACED.value).sum())
    assert again < count * 0.6, f"seed {SEED}: {again} of {count}"  # 0.22 of them expected


def test_what_is_above_a_few_levels_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(SEED)
    logits = torch.randn(4, 9001, generator=draw) * torch.tensor([0.3, 1.0, 2.0, 1.0])[:, None]
    rows = [{"seed": n, "temperature": 1.3, "top_p": p} for n, p in enumerate((0.9, 0.5, 0.95, 1.0))]
    step = batch(rows, 9001)
    monkeypatch.setattr(chain, "LEVELLED", 0)
    peaks, guessed, tails = (after("survey_kernel", n, monkeypatch) for n in (3, 5, 6))
    assert torch.equal(drawn(logits, step), by_parts(logits, step, STAGES))
    padded = torch.nn.functional.pad(logits[:3].double(), (0, 3 * 4096 - 9001), value=-float("inf"))
    fours = padded.view(3, 3, 1024, 4)
    weights = ((fours - peaks[0][:3, :, None, None].double()) / 1.3).exp().sum(-1)
    level = guessed[0][:3, :3].double()
    assert (level[:, 1:] > level[:, :-1]).all()
    assert (level <= logits[:3].amax(1, keepdim=True)).all()
    above = fours.amax(-1)[:, None] >= level[:, :, None, None]
    expected = (weights[:, None] * above).sum(-1)
    torch.testing.assert_close(tails[0][:3].view(3, 3, 3).double(), expected, rtol=1e-5, atol=1e-6)
    # What is below a level is more than top-p removes, by what the sample says.
    shrink = ((peaks[0][:3].double() - peaks[0][:3].amax(1, keepdim=True).double()) / 1.3).exp()
    share = (expected * shrink[:, None]).sum(-1) / (weights.sum(-1) * shrink).sum(-1)[:, None]
    for row, p in enumerate((0.9, 0.5, 0.95)):
        assert (share[row] < p).sum() >= 1, f"seed {SEED}: {share[row]}"


def test_more_than_131072_tokens_are_looked_at_in_larger_groups() -> None:
    logits = torch.randn(2, 140001, generator=torch.Generator().manual_seed(SEED)) * 2
    step = batch([{"seed": SEED, "top_k": 50, "temperature": 0.7}, {"seed": SEED, "top_k": 3, "top_p": 0.6}], 140001)
    assert torch.equal(drawn(logits, step), by_parts(logits, step, STAGES))
