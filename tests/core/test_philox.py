"""Philox4x32-10 and the noise E: published vectors, an independent implementation, and our golden file."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_core.reference.philox import exponential, log_exponential, noise_words, philox4x32_10

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "philox.json").read_text())

# Known-answer vectors published with Random123 (D. E. Shaw Research, kat_vectors, philox4x32 10).
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words_of(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def python_philox(counter: list[int], key: list[int]) -> list[int]:
    """Straight from the paper, in Python integers."""
    x, k = list(counter), list(key)
    for round_number in range(10):
        if round_number:
            k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
        left, right = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(right >> 32) ^ x[1] ^ k[0], right % 2**32, (left >> 32) ^ x[3] ^ k[1], left % 2**32]
    return x


def python_word(seed: int, child: int, position: int, purpose: int, token_id: int) -> int:
    stream = 3 * position + purpose
    counter = [token_id // 4, child, stream % 2**32, stream // 2**32]
    return python_philox(counter, [seed % 2**32, seed // 2**32])[token_id % 4]


def float32(value: float) -> float:
    """The nearest float32, ties to even."""
    result: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return result


def bits(value: float) -> str:
    return f"{struct.unpack('<I', struct.pack('<f', value))[0]:08x}"


def python_exponential(word: int) -> float:
    uniform = min(float32((word + 0.5) * 2.0**-32), 1 - 2.0**-24)
    return float32(-math.log1p(-uniform))


def torch_word(seed: int, child: int, position: int, purpose: int, token_id: int, vocab_size: int) -> int:
    def one(value: int) -> torch.Tensor:
        return torch.tensor([value], dtype=torch.int64)

    words = noise_words(one(seed % 2**32), one(seed // 2**32), one(child), one(position), purpose, vocab_size)
    return int(words[0, token_id])


def as_tensors(words: list[int]) -> list[torch.Tensor]:
    return [torch.tensor(word, dtype=torch.int64) for word in words]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_published_answers(counter: str, key: str, answer: str) -> None:
    result = philox4x32_10(as_tensors(words_of(counter)), as_tensors(words_of(key)))
    assert [int(word) for word in result] == words_of(answer)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_the_independent_implementation_gives_them_too(counter: str, key: str, answer: str) -> None:
    assert python_philox(words_of(counter), words_of(key)) == words_of(answer)


def test_equals_python_integers_on_random_words() -> None:
    generator = np.random.default_rng(7)
    table = generator.integers(0, 2**32, size=(200, 6), dtype=np.int64)
    table[:20] |= 0xFFFF0000  # large words, where a product would overflow first
    columns = [torch.from_numpy(table[:, index].copy()) for index in range(6)]
    result = torch.stack(philox4x32_10(columns[:4], columns[4:]), dim=1)
    assert result.tolist() == [python_philox(row[:4], row[4:]) for row in table.tolist()]


@pytest.mark.parametrize("entry", GOLDEN["vectors"], ids=lambda entry: entry["id"])
def test_golden_words_and_noise(entry: dict[str, Any]) -> None:
    word = torch_word(
        entry["seed"], entry["child"], entry["position"], entry["purpose"], entry["token_id"], entry["token_id"] + 1
    )
    assert f"{word:08x}" == entry["word"]
    assert bits(float(exponential(torch.tensor(word)))) == entry["e_float32"]
    assert bits(float(log_exponential(torch.tensor(word)))) == entry["log_e_float32"]


def test_golden_file_says_where_it_comes_from() -> None:
    assert {"definition", "made_by", "checked_against"} <= GOLDEN["provenance"].keys()


@pytest.mark.parametrize("entry", GOLDEN["vectors"], ids=lambda entry: entry["id"])
def test_golden_file_equals_the_independent_implementation(entry: dict[str, Any]) -> None:
    word = python_word(entry["seed"], entry["child"], entry["position"], entry["purpose"], entry["token_id"])
    assert f"{word:08x}" == entry["word"]
    assert bits(python_exponential(word)) == entry["e_float32"]
    assert bits(float32(math.log(python_exponential(word)))) == entry["log_e_float32"]


def test_words_do_not_depend_on_the_vocabulary_size() -> None:
    lo, hi, child, position = (torch.tensor([value], dtype=torch.int64) for value in (5, 6, 7, 8))
    wide = noise_words(lo, hi, child, position, 0, 1001)
    for size in (1, 2, 3, 4, 5, 63, 1000):
        assert torch.equal(noise_words(lo, hi, child, position, 0, size), wide[:, :size])


def test_words_differ_by_seed_child_position_and_purpose() -> None:
    base = (1, 2, 3, 0, 9)
    changed = [(2**32 + 1, 2, 3, 0, 9), (2, 2, 3, 0, 9), (1, 3, 3, 0, 9), (1, 2, 4, 0, 9), (1, 2, 3, 1, 9)]
    words = {torch_word(*arguments, 16) for arguments in [base, *changed]}
    assert len(words) == 6


def test_words_of_no_rows() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert noise_words(none, none, none, none, 0, 10).shape == (0, 10)


EDGES = [0, 1, 2, 2**23, 2**24 - 1, 2**24, 2**24 + 1, 2**31, 2**32 - 513, 2**32 - 257, 2**32 - 129, 2**32 - 1]


@pytest.mark.parametrize("word", EDGES)
def test_exponential_is_the_rounded_float64_value(word: int) -> None:
    assert bits(float(exponential(torch.tensor(word)))) == bits(python_exponential(word))


def test_exponential_is_finite_and_positive_at_both_ends() -> None:
    ends = exponential(torch.tensor([0, 2**32 - 1]))
    assert ends.isfinite().all()
    assert (ends > 0).all()
    assert float(ends[1]) == pytest.approx(24 * math.log(2), abs=1e-6)


def test_noise_of_a_word_does_not_depend_on_its_place() -> None:
    """Vector code and the code for what is left over must agree, at every length and offset."""
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(0, 2**32, (20000,), generator=generator)
    whole = torch.stack((exponential(words), log_exponential(words)))
    for _ in range(400):
        length = int(torch.randint(1, 80, (1,), generator=generator))
        start = int(torch.randint(0, 20000 - length, (1,), generator=generator))
        part = words[start : start + length]
        assert torch.equal(torch.stack((exponential(part), log_exponential(part))), whole[:, start : start + length])


def test_noise_equals_another_library_bit_for_bit() -> None:
    words = torch.randint(0, 2**32, (200000,), generator=torch.Generator().manual_seed(4))
    uniform = np.minimum(((words.numpy() + 0.5) * 2.0**-32).astype(np.float32), np.float32(1 - 2.0**-24))
    expected = (-np.log1p(-uniform.astype(np.float64))).astype(np.float32)
    assert np.array_equal(exponential(words).numpy(), expected)
    logs = np.log(expected.astype(np.float64)).astype(np.float32)
    assert np.array_equal(log_exponential(words).numpy(), logs)


def test_exponential_has_mean_and_variance_one() -> None:
    count = 1 << 18
    one = torch.ones(1, dtype=torch.int64)
    values = exponential(noise_words(one, one, one, one, 0, count))[0].double()
    # Five standard errors: of the mean 1/sqrt(n), of the variance sqrt(8/n).
    assert abs(values.mean() - 1) < 5 / count**0.5
    assert abs(values.var() - 1) < 5 * (8 / count) ** 0.5
