"""Sampling stages and runner operators against the reference: equal bits where the definition fixes them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from deepinfer_nvidia_sm100.ops import lagging, logprobs
from deepinfer_nvidia_sm100.ops import temperature as two_readings
from gpu_support import DEVICE, here, operator
from reference_support import batch
from reference_support import operator as reference

from deepinfer_core.api import (
    AppendTokensRequest,
    InputIdsRequest,
    SamplingBatch,
    SamplingRequest,
    SlotMappingRequest,
)

NAN, INF = float("nan"), float("inf")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def both(stage: str, logits: torch.Tensor, step: SamplingBatch) -> tuple[torch.Tensor, torch.Tensor]:
    request = SamplingRequest(stage=stage, vocab_size=logits.shape[1])
    found = operator(request).run(here(logits.clone()), here(step)).cpu()
    return found, reference(request).run(logits.clone(), step)


def equal(stage: str, logits: torch.Tensor, rows: list[dict[str, Any]], **changes: Any) -> None:
    found, expected = both(stage, logits, batch(rows, logits.shape[1], **changes))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def random_rows(source: random.Random, count: int) -> list[dict[str, Any]]:
    return [
        {
            "seed": source.getrandbits(64),
            "child": source.randrange(5),
            "temperature": source.choice([0.0, 1e-6, 0.3, 1.0, 1.0, 1.7]),
            "position": source.choice([0, 3, 1000, 2**31, 2**40]),
        }
        for _ in range(count)
    ]


@pytest.mark.parametrize("vocab_size", [1, 2, 5, 64, 1003, 9001])
@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0, 1e3, 1e7])
def test_draws_are_the_references(vocab_size: int, scale: float) -> None:
    source = random.Random(vocab_size)
    equal("draw", normal(8, vocab_size, seed=vocab_size) * scale, random_rows(source, 8))


def test_draws_of_broken_and_masked_rows() -> None:
    logits = normal(7, 5000)
    logits[0, 4999] = NAN
    logits[1, 0] = INF
    logits[2] = -INF
    logits[3, :4990] = -INF
    logits[4] = -INF
    logits[4, 4096] = -3.0
    logits[5, 7] = -NAN
    for temperature in (0.0, 1.0):
        equal("draw", logits, [{"seed": n, "temperature": temperature} for n in range(7)])


def test_equal_scores_go_to_the_lowest_id() -> None:
    logits = torch.full((1, 9000), -1.0)
    logits[0, [4095, 4096, 8999]] = 2.0
    found, _ = both("draw", logits, batch([{"temperature": 0.0}], 9000))
    assert found.tolist() == [4095]


WAYS = {"few rows": (1000, 512), "many rows": (1, 512), "parts that are left": (1, 1)}


@pytest.fixture(params=list(WAYS))
def many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that the cache holds and rows that it does not, with programs that find their row's parts, and do not."""
    many, lag = WAYS[request.param]
    monkeypatch.setattr(two_readings, "MANY", many)
    monkeypatch.setattr(two_readings, "WIDE", 1)
    monkeypatch.setattr(lagging, "LAG", lag)


@pytest.mark.usefixtures("many")
def test_temperature() -> None:
    logits = normal(6, 4500) * 5
    logits[1, ::2] = -INF
    logits[2] = -INF
    equal("temperature", logits, [{"temperature": t} for t in (0.7, 1.7, 0.3, 0.5, 1.0, 0.0)])
    logits[3, 3] = NAN  # the rest of a broken row may say anything
    found, _ = both("temperature", logits, batch([{"temperature": 0.5}] * 6, 4500))
    assert found[3].isnan().any()
    assert not found[[0, 1, 2, 4, 5]].isnan().any()


def test_what_was_read_long_before_is_left_only_where_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, every part of a row has been read when LAG programs were started since; with fewer, some have not."""
    logits, left = here(normal(3, 18000)), []
    plain = lagging.left_kernel

    class Seen:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*arguments: Any, **options: Any) -> None:
                left.append(arguments[2].cpu().clone())
                plain[grid](*arguments, **options)

            return launch

    monkeypatch.setattr(two_readings, "MANY", 1)
    monkeypatch.setattr(two_readings, "WIDE", 1)
    monkeypatch.setattr(lagging, "left_kernel", Seen())
    step = here(batch([{"temperature": 0.7}] * 3, 18000))
    for lag in (512, 1):
        monkeypatch.setattr(lagging, "LAG", lag)
        operator(SamplingRequest(stage="temperature", vocab_size=18000)).run(logits.clone(), step)
    assert left[0].sum() == 0
    if DEVICE.type == "cpu":  # one after the other: the last two of five parts are written after all were read
        assert left[1].sum(1).tolist() == [3, 3, 3]


@pytest.mark.usefixtures("many")
def test_min_p() -> None:
    logits = normal(5, 4500) * 3
    logits[1, 100:] = -INF
    equal("min_p", logits, [{"min_p": p} for p in (0.0, 0.05, 0.3, 1.0, 1e-4)])


def test_mask() -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": [1, 2, 3], "output": [4, 5], "bad_words": [[4, 5, 9], [7], [5, 5, 8]]},
        {"prompt": [1], "stop_ids": [2, 3000], "min_end": 9},
        {"prompt": [1], "stop_ids": [2], "min_end": 1},
        {"allowed": [0, 31, 32, 4200], "bad_words": [[1, 2, 3, 4, 5, 6]]},
        {"grammar": [5, 63, 64, 4209]},
        {},
    ]
    equal("mask", normal(6, 4210), rows)
    equal("mask", normal(6, 4210), rows, token_limit=4111)
    equal("mask", normal(1, 70), [{}])


def test_bias() -> None:
    rows = [{"bias": {3: 1.5, 99: -INF}}, {}, {"bias": {0: 2.0, 500: 9.0}}]
    equal("bias", normal(3, 100), rows)


def test_penalties() -> None:
    source = random.Random(4)
    rows: list[dict[str, Any]] = [
        {
            "prompt": [source.randrange(60) for _ in range(source.randrange(1, 40))],
            "output": [source.randrange(60) for _ in range(source.randrange(1500))],
            "presence": source.choice([0.0, 0.4]),
            "frequency": source.choice([0.0, 0.3, -0.2]),
            "repetition": source.choice([1.0, 1.3, 0.7]),
        }
        for _ in range(12)
    ]
    found, expected = both("penalties", logits := normal(12, 70) * 3, batch(rows, 70))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # a fused multiply-add rounds once
    off = [n for n, r in enumerate(rows) if (r["presence"], r["frequency"], r["repetition"]) == (0.0, 0.0, 1.0)]
    assert torch.equal(found[off], logits[off])


def test_rows_of_one_slot_are_penalised_up_to_their_own_position() -> None:
    step = batch([{"prompt": [1], "output": [2, 3, 2], "frequency": 1.0}], 10)
    step.slots, step.positions = torch.tensor([0, 0, 0]), torch.tensor([1, 2, 4])
    found, expected = both("penalties", normal(3, 10), step)
    assert torch.equal(found, expected)


def test_top_k() -> None:
    logits = (normal(9, 5000) * 2).round(decimals=1)  # many equals
    logits[2, 40:] = -INF
    logits[3, 0] = NAN
    logits[4, ::3], logits[4, 1::3] = 0.0, -0.0
    step = batch([{"top_k": k} for k in (1, 7, 50, 3, 1700, 0, 5000, 4999, 2000)], 5000)
    found, expected = both("top_k", logits, step)
    assert found[3].isnan().any(), "a broken row stays one"
    assert torch.equal(found[torch.arange(9) != 3], expected[torch.arange(9) != 3])


def test_top_p() -> None:
    logits = normal(9, 5000, seed=3) * 3
    logits[2, 40:] = -INF
    logits[3, 17] = NAN
    logits[4] = 1.0
    limits = (0.5, 0.9, 0.95, 0.5, 0.25, 1.0, 0.0, 1e-3, 0.999)
    found, expected = both("top_p", logits, batch([{"top_p": p} for p in limits], 5000))
    assert found[3].isnan().any(), "a broken row stays one"
    for row, limit in enumerate(limits):
        if row == 3:
            continue
        kept, wanted = (x[row] != -INF for x in (found, expected))
        assert abs(int(kept.sum()) - int(wanted.sum())) <= (limit > 0.9), f"row {row}"
        assert int((kept != wanted).sum()) <= (limit > 0.9), f"row {row}: a sum at the limit may round either way"
        assert torch.equal(found[row][kept].nan_to_num(7), logits[row][kept].nan_to_num(7))


@pytest.mark.parametrize("k", [0, 1, 5, 300])
def test_logprobs(k: int) -> None:
    logits = (normal(4, 300) * 3).round(decimals=1)
    logits[1, 100:] = -INF
    ids = torch.tensor([5, 3, -1, 299])
    request = SamplingRequest(stage="logprobs", vocab_size=300)
    found = operator(request).run(here(logits), here(ids), k)
    expected = reference(request).run(logits, ids, k)
    assert torch.equal(found.rank.cpu(), expected.rank)
    assert torch.equal(found.top_ids.cpu(), expected.top_ids)
    for ours, theirs in ((found.chosen, expected.chosen), (found.top, expected.top)):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_alternatives_of_a_prompt_are_selected_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    plain = logprobs._best
    monkeypatch.setattr(logprobs, "TOGETHER", 3)
    monkeypatch.setattr(logprobs, "_best", lambda logits, k: rows.append(len(logits)) or plain(logits, k))
    logits, ids = (normal(8, 90) * 3).round(decimals=1), torch.arange(8)
    request = SamplingRequest(stage="logprobs", vocab_size=90)
    found = operator(request).run(here(logits), here(ids), 5)
    expected = reference(request).run(logits, ids, 5)
    assert rows == [3, 3, 2]
    assert torch.equal(found.top_ids.cpu(), expected.top_ids)
    torch.testing.assert_close(found.top.cpu(), expected.top, rtol=1e-5, atol=1e-5)
    assert operator(request).run(here(logits[:0]), here(ids[:0]), 5).top.shape == (0, 5)


def test_no_rows() -> None:
    for stage in ("mask", "bias", "penalties", "temperature", "min_p", "top_k", "top_p", "draw"):
        found, expected = both(stage, torch.zeros(0, 40), batch([], 40))
        assert found.shape == expected.shape


def test_runner_operators() -> None:
    history = torch.from_numpy(np.random.default_rng(0).integers(0, 99, (5, 40), dtype=np.int32))
    slots, positions = torch.tensor([4, 0, 2]), torch.tensor([0, 39, 7])
    ids = InputIdsRequest()
    found = operator(ids).run(here(history), here(slots), here(positions))
    assert torch.equal(found.cpu(), reference(ids).run(history, slots, positions))
    mapping, table = SlotMappingRequest(block_size=16), torch.tensor([[3, 9, 1], [7, 0, 2]], dtype=torch.int32)
    owners = torch.tensor([1, 0, 0])
    found = operator(mapping).run(here(table), here(owners), here(positions))
    assert torch.equal(found.cpu(), reference(mapping).run(table, owners, positions))
    append, tokens = AppendTokensRequest(), torch.tensor([8, -1, 5])
    ours = here(history.clone())
    operator(append).run(ours, here(slots), here(positions), here(tokens))
    reference(append).run(history, slots, positions, tokens)
    assert torch.equal(ours.cpu(), history)
    assert ours.device.type == DEVICE.type
