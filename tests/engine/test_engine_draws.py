"""Draws end to end: over seeds and positions they follow the model's distribution (chi-square)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare
from toys.checks import ids_of
from toys.oracle import const_logits, log_softmax

from deepinfer_core import SamplingParams

LOGITS = {3: 2.0, 5: 1.9, 7: 0.2}
SEEDS = 48
TOKENS = 60
P_VALUE = 1e-4


def tokens_drawn(llm: Any, **params: Any) -> np.ndarray[Any, Any]:
    """Counts of each id over ``SEEDS`` requests of ``TOKENS`` tokens."""
    batch = [SamplingParams(**{"seed": seed, "max_tokens": TOKENS} | params) for seed in range(SEEDS)]
    outputs = llm.generate([[1]] * SEEDS, batch)
    return np.bincount(np.concatenate(ids_of(outputs)), minlength=llm.engine.planned.spec.vocab_size)


def fits(counts: np.ndarray[Any, Any], probabilities: np.ndarray[Any, Any]) -> bool:
    """Chi-square over cells with at least five expected draws, the others pooled."""
    expected = probabilities * counts.sum()
    large = expected >= 5
    cells, wanted = counts[large].tolist(), expected[large].tolist()
    if expected[~large].sum() > 0:
        cells.append(counts[~large].sum())
        wanted.append(expected[~large].sum())
    if len(cells) == 1:
        return bool(cells[0] == counts.sum())
    return bool(chisquare(cells, np.array(wanted) * sum(cells) / sum(wanted)).pvalue > P_VALUE)


def test_flat(toy_llm: Any) -> None:
    assert fits(tokens_drawn(toy_llm("Flat")), np.full(64, 1 / 64))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_const_at_a_temperature(toy_llm: Any, temperature: float) -> None:
    expected = np.exp(log_softmax(const_logits(LOGITS, 16) / temperature))
    counts = tokens_drawn(toy_llm("Const"), temperature=temperature)
    assert fits(counts, expected)
    assert not fits(counts, np.exp(log_softmax(const_logits(LOGITS, 16) / (temperature * 1.6))))


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, [3, 5]),
        ({"top_p": 0.8}, [3, 5]),
        ({"min_p": 0.1}, [3, 5, 7]),
        ({"allowed_token_ids": [5, 7]}, [5, 7]),
        ({"logit_bias": {3: -1e9}}, [i for i in range(16) if i != 3]),
        ({"top_k": 3, "top_p": 0.9, "min_p": 0.2}, [3, 5]),
    ],
)
def test_const_with_a_filter(toy_llm: Any, params: dict[str, Any], kept: list[int]) -> None:
    logits = np.full(16, -np.inf)
    logits[kept] = const_logits(LOGITS, 16)[kept]
    counts = tokens_drawn(toy_llm("Const"), **params)
    assert counts[[i for i in range(16) if i not in kept]].sum() == 0
    assert fits(counts, np.exp(log_softmax(logits)))
