"""The host's draw gives the reference's tokens, whatever it leaves out."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference_support
import torch
from cpu_support import normal, stage
from reference_support import batch

from deepinfer_core.cpu import draw as module
from deepinfer_core.cpu.draw import Draw, _Stream, log_exponential
from deepinfer_core.cpu.philox import philox4x32_10

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "philox.json").read_text())["vectors"]
NAN, INF = float("nan"), float("inf")


def both(logits: torch.Tensor, rows: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Tokens of the host's draw and of the reference's."""
    step = batch(rows, logits.shape[1])
    kept = logits.clone()
    found = stage("draw", logits.shape[1]).run(logits, step)
    assert torch.equal(logits.nan_to_num(7.0), kept.nan_to_num(7.0))
    assert found.dtype == torch.int64
    return found.tolist(), reference_support.stage("draw", logits.shape[1]).run(kept, step).tolist()


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


@pytest.mark.parametrize("vocab_size", [1, 2, 5, 64, 1003, 20000])
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 4.0, 30.0, 1e3, 1e7])
def test_tokens_equal_the_reference(vocab_size: int, scale: float) -> None:
    source = random.Random(vocab_size)
    for seed in range(3):
        found, expected = both(normal(8, vocab_size, seed=seed) * scale, random_rows(source, 8))
        assert found == expected


@pytest.mark.parametrize("kept", [1, 3, 40, 900])
def test_tokens_equal_the_reference_after_filters(kept: int) -> None:
    logits = normal(12, 1000, seed=kept) * 2
    for row in logits:
        row[torch.randperm(1000, generator=torch.Generator().manual_seed(kept))[kept:]] = -INF
    found, expected = both(logits, random_rows(random.Random(kept), 12))
    assert found == expected


def test_every_seed_of_a_small_vocabulary() -> None:
    """Close races: all logits equal, so that the noise alone decides."""
    rows = [{"seed": seed, "position": seed % 7} for seed in range(400)]
    found, expected = both(torch.zeros(400, 300), rows)
    assert found == expected
    assert len(set(found)) > 100


def test_greedy_takes_the_lowest_of_equals() -> None:
    found, expected = both(torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]]), [{"temperature": 0.0}] * 2)
    assert found == expected == [1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_rows_give_minus_one_and_touch_no_other(temperature: float) -> None:
    logits = normal(6, 50, seed=1)
    row = {"temperature": temperature, "seed": 5}
    clean, _ = both(logits.clone(), [row] * 6)
    logits[1, 7], logits[2, 0], logits[4], logits[5, 3] = NAN, INF, -INF, -INF
    found, expected = both(logits, [row] * 6)
    assert found == expected
    assert [found[i] for i in (1, 2, 4)] == [-1, -1, -1]
    assert [found[i] for i in (0, 3)] == [clean[i] for i in (0, 3)]


def test_no_rows() -> None:
    assert both(torch.zeros(0, 9), []) == ([], [])


def test_the_whole_vocabulary_is_worked_on_only_when_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clear favourite, or few tokens left by filters, need the noise of few tokens."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("computed the noise of every token")

    monkeypatch.setattr(Draw, "_likely", refuse)
    logits = torch.zeros(1, 5000)
    logits[0, [3, 9]] = 30.0
    assert both(logits, [{"seed": 1}])[0][0] in (3, 9)


# ---- the noise and its bounds


@pytest.mark.parametrize("vector", GOLDEN, ids=lambda v: v["id"])
def test_golden_noise(vector: dict[str, Any]) -> None:
    stream = 3 * vector["position"] + vector["purpose"]
    noise = _Stream(
        (vector["seed"] % 2**32, vector["seed"] // 2**32), (vector["child"], stream % 2**32, stream // 2**32)
    )
    quad = np.array([vector["token_id"] // 4], np.uint64)
    assert f"{int(noise.words(quad)[vector['token_id'] % 4][0]):08x}" == vector["word"]
    (value,) = log_exponential(noise, np.array([vector["token_id"]]))
    assert f"{value.view(np.uint32):08x}" == vector["log_e_float32"]


def test_published_vectors() -> None:
    """Random123's known answers for philox4x32, ten rounds."""
    ones = 0xFFFFFFFF
    assert [int(w) for w in philox4x32_10((0, 0, 0, 0), (0, 0))] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [int(w) for w in philox4x32_10((ones,) * 4, (ones, ones))] == [
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    ]


def exact_noise(words: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """-log E by the definition, in float64 from the float32 uniform."""
    uniform = np.minimum(
        (2 * words.astype(np.uint64) + np.uint64(1)).astype(np.float32) * np.float32(2.0**-33), 1 - 2.0**-24
    )
    return -np.log(-np.log1p(-uniform.astype(np.float64)))


def edge_words() -> np.ndarray[Any, Any]:
    """The ends of the range, and words all over it."""
    ends = np.concatenate([np.arange(4096), 2**32 - 1 - np.arange(200000)])
    return np.concatenate([ends, np.random.default_rng(0).integers(0, 2**32, 200000)])


def test_noise_stays_in_its_range() -> None:
    noise = exact_noise(edge_words())
    assert noise.max() - noise.min() < module.NOISE_RANGE
    assert math.isclose(noise.max(), 33 * math.log(2), abs_tol=1e-6)


def test_approximate_noise_is_close_enough() -> None:
    """Two scores each off by at most this bound are compared, so half the margin must cover it."""
    words = edge_words()
    uniform = torch.from_numpy(words.astype(np.float32)).mul_(2.0**-32).add_(2.0**-33)
    approximate = -uniform.clamp_(max=float(module._LARGEST_UNIFORM)).neg_().log1p_().neg_().log_()
    error = np.abs(approximate.numpy() - exact_noise(words)).max()
    assert error < module.APPROXIMATION / 2
