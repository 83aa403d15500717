"""The comparison's n-gram model, against counting with dictionaries."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
from deepinfer_demo_v4.recipe import kneser_ney

VOCABULARY = 9


def stream(seed: int, files: int = 6, length: int = 40) -> np.ndarray:
    """Files of a skewed random text over token ids 2 to 8."""
    rng = np.random.default_rng(seed)
    parts = []
    for _ in range(files):
        text = 2 + np.minimum(rng.geometric(0.4, length) - 1 + np.arange(length) % 3, VOCABULARY - 3)
        parts += [[0], text, [1]]
    return np.concatenate(parts).astype(np.uint16)


class Counted:
    """Interpolated modified Kneser-Ney, word for word from the paper."""

    def __init__(self, tokens: list[int], order: int) -> None:
        grams = Counter(tuple(tokens[i - order + 1 : i + 1]) for i in range(order - 1, len(tokens)) if tokens[i] != 0)
        self.counts = {order: dict(grams)}
        for n in range(order - 1, 0, -1):
            self.counts[n] = dict(Counter(gram[1:] for gram in self.counts[n + 1]))
        self.followers: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for n, grams_n in self.counts.items():
            followers = defaultdict(list)
            for gram, count in grams_n.items():
                followers[gram[:-1]].append(count)
            self.followers[n] = dict(followers)

    def discount(self, n: int, count: int) -> float:
        n1, n2, n3, n4 = (max(sum(c == k for c in self.counts[n].values()), 1) for k in (1, 2, 3, 4))
        y = n1 / (n1 + 2 * n2)
        k = min(count, 3)
        raw = {1: 1 - 2 * y * n2 / n1, 2: 2 - 3 * y * n3 / n2, 3: 3 - 4 * y * n4 / n3}[k]
        return min(max(raw, 0.0), k - 0.01)

    def probability(self, history: tuple[int, ...], token: int) -> float:
        n = len(history) + 1
        lower = self.probability(history[1:], token) if history else 1 / VOCABULARY
        followers = self.followers[n].get(history)
        if followers is None:
            return lower
        count = self.counts[n].get((*history, token), 0)
        kept = count - self.discount(n, count) if count else 0.0
        spread = sum(self.discount(n, c) for c in followers)
        return (kept + spread * lower) / sum(followers)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_against_dictionaries(order: int) -> None:
    train, held = stream(1), stream(2)
    fitted = kneser_ney.fit(train, order)
    oracle = Counted(kneser_ney.padded(train, order).tolist(), order)
    tokens = kneser_ney.padded(held, order)
    found = kneser_ney.probabilities(fitted, tokens, VOCABULARY)
    ids = tokens.tolist()
    wanted = [oracle.probability(tuple(ids[i - order + 1 : i]), ids[i]) for i in range(order - 1, len(ids))]
    assert np.allclose(found, wanted, rtol=1e-12)


def test_probabilities_of_all_tokens_add_up_to_one() -> None:
    fitted = kneser_ney.fit(stream(3), 5)
    rng = np.random.default_rng(4)
    for history in rng.integers(2, VOCABULARY, (20, 4)):
        total = sum(
            kneser_ney.probabilities(fitted, np.append(history, token), VOCABULARY)[0] for token in range(VOCABULARY)
        )
        assert total == pytest.approx(1.0)


def test_end_marks_are_not_counted() -> None:
    lengths = np.array([0, 0, *[1] * 7])
    found = kneser_ney.bits_per_byte(kneser_ney.fit(stream(5), 3), stream(6), lengths)
    assert found["held_out_bytes"] == found["held_out_tokens"] == 6 * 40
    assert 0 < found["held_out_bits_per_byte"] < 3.2
