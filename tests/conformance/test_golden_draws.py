"""The stored draws, made again from Python integers: no code of the package takes part."""

from __future__ import annotations

import json
import math
import struct
from importlib import resources
from typing import Any

import pytest

GOLDEN: Any = json.loads(resources.files("deepinfer_core.conformance").joinpath("golden_draws.json").read_text())
WORD = 0xFFFFFFFF


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 as published (Salmon et al. 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & WORD, (first >> 32) ^ c3 ^ k1, first & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def float32(x: float) -> float:
    found: float = struct.unpack("f", struct.pack("f", x))[0]
    return found


def noise(word: int) -> float:
    """``log E`` of a word."""
    uniform = min(float32(float32(2 * word + 1) * 2.0**-33), 1 - 2.0**-24)
    return float32(math.log(float32(-math.log1p(-uniform))))


def test_philox_is_the_published_one() -> None:
    """Known-answer vectors of Random123."""
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox((WORD,) * 4, (WORD, WORD)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


@pytest.mark.parametrize("draw", GOLDEN["draws"], ids=lambda d: f"{d['seed']}-{d['child']}-{d['position']}")
def test_the_stored_token_has_the_least_noise(draw: dict[str, int]) -> None:
    stream, key = 3 * draw["position"], (draw["seed"] & WORD, draw["seed"] >> 32)
    values: list[float] = []
    for quad in range(-(-GOLDEN["vocab_size"] // 4)):
        values += map(noise, philox((quad, draw["child"], stream & WORD, stream >> 32), key))
    values = values[: GOLDEN["vocab_size"]]
    assert values.index(min(values)) == draw["token"]
