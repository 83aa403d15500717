"""Prompt lookup against a search written out, over histories of few tokens so that runs repeat."""

from __future__ import annotations

import random

import torch
from deepinfer_spec_decode.ngram import lookup
from hypothesis import given, settings
from hypothesis import strategies as st


def searched(past: list[int], depth: int, longest: int, shortest: int) -> list[int]:
    """The longest run of last tokens that occurred before, of equal ones the newest; what repeats goes on repeating."""
    for length in range(min(longest, len(past)), shortest - 1, -1):
        ends = [e for e in range(length - 1, len(past) - 1) if past[e - length + 1 : e + 1] == past[-length:]]
        if ends:
            text = list(past)
            for _ in range(depth):
                text.append(text[ends[-1] + 1 + len(text) - len(past)])
            return text[len(past) :]
    return [-1] * depth


@settings(max_examples=200)
@given(seed=st.integers(0, 10**6), longest=st.integers(1, 5), depth=st.integers(1, 8))
def test_drafts_are_what_followed_before(seed: int, longest: int, depth: int) -> None:
    rng = random.Random(seed)
    shortest = rng.randint(1, longest)
    lengths = [rng.randrange(1, 30) for _ in range(4)]
    rows = [[rng.randrange(3) for _ in range(31)] for _ in lengths]  # tokens past the anchor are left from others
    found = lookup(torch.tensor(rows), torch.tensor(lengths) - 1, depth, longest, shortest)
    wanted = [searched(row[:n], depth, longest, shortest) for row, n in zip(rows, lengths, strict=True)]
    assert found.tolist() == wanted
