"""Bits per byte of held-out text: the model's, over exported weights in float32.

    python -m deepinfer_demo_v4.recipe.evaluate --model DIR --held-out held_out.xz

Each file is read in windows of 1,024 tokens that overlap by half, so that every token but a file's first 512 is
predicted from at least 512 before it. Bytes are those of the predicted tokens; the end mark is not counted.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders

from . import checkpoint
from .attention import Selection
from .corpus import read_stream
from .forward import forward, logits
from .layers import Weights
from .shape import Shape
from .vocabulary import BOS_ID, EOS_ID

WINDOW = 1024


def byte_lengths(tokenizer: Path) -> np.ndarray:
    """``[vocab]`` int64: bytes of each token, 0 for the special ones."""
    loaded = Tokenizer.from_file(str(tokenizer))
    # A byte-level vocabulary writes every byte as one character.
    assert isinstance(loaded.decoder, decoders.ByteLevel)
    special = set(loaded.get_added_tokens_decoder())
    pieces = [loaded.id_to_token(i) or "" for i in range(loaded.get_vocab_size())]
    return np.array([0 if i in special else len(piece) for i, piece in enumerate(pieces)])


def texts(stream: np.ndarray) -> list[np.ndarray]:
    """A stream's files, each from its begin mark up to, without, its end mark."""
    starts = np.nonzero(stream == BOS_ID)[0]
    ends = np.nonzero(stream == EOS_ID)[0]
    return [stream[s:e] for s, e in zip(starts, ends, strict=True)]


def windows(stream: np.ndarray) -> list[tuple[np.ndarray, int]]:
    """``(tokens, first)``: predictions of ``tokens[first:]`` count, each token of each file once."""
    found = []
    for text in texts(stream):
        start = 0
        while True:
            part = text[start : start + WINDOW]
            found.append((part, 1 if start == 0 else WINDOW // 2))
            if start + WINDOW >= len(text):
                break
            start += WINDOW // 2
    return found


def bits_per_byte(
    weights: Weights, shape: Shape, stream: np.ndarray, lengths: np.ndarray, limit: int | None = None
) -> dict[str, float]:
    """``held_out_bits_per_byte`` and what it was taken over."""
    device = weights["embed.weight"].device
    found = sorted(windows(stream), key=lambda pair: len(pair[0]))
    if limit:
        found = found[:: max(1, len(found) // limit)]
    bits, size, count = 0.0, 0, 0
    batch = 64 if device.type == "cuda" else 2
    for start in range(0, len(found), batch):
        group = found[start : start + batch]
        longest = max(len(tokens) for tokens, _ in group)
        ids = torch.zeros(len(group), longest, dtype=torch.int64)
        counted = torch.zeros(len(group), longest, dtype=torch.bool)
        for row, (tokens, first) in enumerate(group):
            ids[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
            counted[row, first : len(tokens)] = True
        ids, counted = ids.to(device), counted.to(device)
        hidden = forward(weights, ids, shape, Selection()).hidden
        nats = torch.nn.functional.cross_entropy(
            logits(weights, hidden[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        kept = counted[:, 1:].flatten()
        bits += float(nats[kept].double().sum()) / math.log(2)
        size += int(lengths[ids[:, 1:].flatten()[kept].cpu().numpy()].sum())
        count += int(kept.sum())
    return {"held_out_bits_per_byte": round(bits / size, 4), "held_out_bytes": size, "held_out_tokens": count}


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--windows", type=int, help="only about so many of them")
    options = parser.parse_args()
    shape = Shape.read(json.loads((options.model / "config.json").read_text()))
    lengths = byte_lengths(options.model / "tokenizer.json")
    with torch.no_grad():
        found = bits_per_byte(
            checkpoint.load(options.model), shape, read_stream(options.held_out), lengths, options.windows
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
