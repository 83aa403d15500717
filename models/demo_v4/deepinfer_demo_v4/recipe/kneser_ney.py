"""An n-gram model over the same tokens, for comparison: interpolated, modified Kneser-Ney.

    python -m deepinfer_demo_v4.recipe.kneser_ney --data DIR

Chen and Goodman 1998, "An Empirical Study of Smoothing Techniques for Language Modeling", section 3: three discounts an
order, estimated from counts of counts; lower orders count distinct left neighbours. Every file is preceded by as many
begin marks as the longest history has tokens.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .corpus import read_stream
from .evaluate import byte_lengths, texts
from .vocabulary import BOS_ID, EOS_ID

BITS = 12
"""Of one token id in a packed n-gram: five of them fit an int64."""


@dataclass(frozen=True)
class Order:
    """N-grams of one length.

    Attributes:
        grams: packed, ascending. mass: ``(count - discount)`` of each.
        histories: packed, ascending. total, spread: of each history, the counts' sum and the discounts' sum.
    """

    grams: np.ndarray
    mass: np.ndarray
    histories: np.ndarray
    total: np.ndarray
    spread: np.ndarray


def padded(stream: np.ndarray, order: int) -> np.ndarray:
    """All files, each between ``order - 1`` begin marks and an end mark: ``[n]`` int64."""
    front, back = np.full(order - 1, BOS_ID, np.int64), np.array([EOS_ID], np.int64)
    return np.concatenate([part for text in texts(stream) for part in (front, text[1:].astype(np.int64), back)])


def packed(tokens: np.ndarray, length: int) -> np.ndarray:
    """The n-gram that ends at each position from ``length - 1`` on, int64."""
    keys = np.zeros(len(tokens) - length + 1, np.int64)
    for place in range(length):
        keys = (keys << BITS) | tokens[place : len(tokens) - length + 1 + place]
    return keys


def counted(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct keys, ascending, and how often each occurs; ``keys`` is sorted in place."""
    keys.sort()
    starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    return keys[starts], np.diff(np.append(starts, len(keys)))


def discounts(counts: np.ndarray) -> np.ndarray:
    """``D(c)`` for c of 0, 1, 2 and 3 or more."""
    n1, n2, n3, n4 = (max(int((counts == c).sum()), 1) for c in (1, 2, 3, 4))
    y = n1 / (n1 + 2 * n2)
    found = np.array([0.0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
    kept: np.ndarray = np.clip(found, 0.0, np.array([0.0, 0.99, 1.99, 2.99]))
    return kept


def order_of(grams: np.ndarray, counts: np.ndarray) -> Order:
    """With its discounts applied."""
    taken = discounts(counts)[np.minimum(counts, 3)]
    histories = grams >> BITS
    starts = np.flatnonzero(np.concatenate(([True], histories[1:] != histories[:-1])))
    total, spread = np.add.reduceat(counts, starts), np.add.reduceat(taken, starts)
    return Order(grams, counts - taken, histories[starts], total.astype(np.float64), spread)


def fit(stream: np.ndarray, order: int) -> list[Order]:
    """Orders 1, 2, ... up to ``order`` of a token stream."""
    tokens = padded(stream, order)
    keys = packed(tokens, order)
    grams, counts = counted(keys[tokens[order - 1 :] != BOS_ID])
    orders = [order_of(grams, counts)]
    for length in range(order - 1, 0, -1):
        # Each longer n-gram, counted once, is one more left neighbour of what it ends with.
        grams, counts = counted(grams & ((1 << (BITS * length)) - 1))
        orders.append(order_of(grams, counts))
    return orders[::-1]


def probabilities(orders: list[Order], tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """Of each token from number ``len(orders) - 1`` on, given those before it, float64."""
    longest = len(orders)
    found = np.full(len(tokens) - longest + 1, 1.0 / vocabulary)
    for length, order in enumerate(orders, start=1):
        keys = packed(tokens[longest - length :], length)
        mass = _looked_up(order.grams, order.mass, keys)
        total = _looked_up(order.histories, order.total, keys >> BITS)
        spread = _looked_up(order.histories, order.spread, keys >> BITS)
        seen = total > 0
        safe = np.where(seen, total, 1.0)
        found = np.where(seen, (mass + spread * found) / safe, found)
    return found


def _looked_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0.0)


def bits_per_byte(orders: list[Order], stream: np.ndarray, lengths: np.ndarray) -> dict[str, float]:
    """As ``evaluate.bits_per_byte`` counts: end marks are left out."""
    tokens = padded(stream, len(orders))
    found = probabilities(orders, tokens, len(lengths))
    predicted = tokens[len(orders) - 1 :]
    kept = (predicted != BOS_ID) & (predicted != EOS_ID)
    bits, size = -float(np.log(found[kept]).sum()) / math.log(2), int(lengths[predicted[kept]].sum())
    return {"held_out_bits_per_byte": round(bits / size, 4), "held_out_bytes": size, "held_out_tokens": int(kept.sum())}


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="what recipe.corpus wrote")
    parser.add_argument("--order", type=int, default=5)
    options = parser.parse_args()
    lengths = byte_lengths(options.data / "tokenizer.json")
    orders = fit(read_stream(options.data / "train.xz"), options.order)
    found = bits_per_byte(orders, read_stream(options.data / "held_out.xz"), lengths)
    print(json.dumps({"order": options.order, "grams": [len(o.grams) for o in orders], **found}))


if __name__ == "__main__":
    main()
