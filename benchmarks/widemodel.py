"""A vocabulary as wide as a large model's, and a model with logits of that width: SmolLM2's shape, random weights."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from common import random_qwen3

from deepinfer_core.api import Vocabulary

WIDTH = 129_280
END = "<|end|>"
SHAPE: Mapping[str, Any] = {
    "vocab_size": WIDTH,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "bos_token_id": WIDTH - 1,
    "eos_token_id": WIDTH - 1,
}
"""SmolLM2-135M's, with another vocabulary: 181 million parameters."""


def synthetic_tokens(count: int = WIDTH) -> list[bytes]:
    """All bytes, pieces of JSON and words of syllables, in the proportions of a large byte-level vocabulary."""
    source = random.Random(0)
    syllables = [a + b for a in "bcdfghklmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "er", "in", "on", "st")]
    found = dict.fromkeys(bytes([byte]) for byte in range(256))
    for piece in ('{"', '":', '": "', '", "', '"}', "},", '": ', '": [', '"],', "true", "false", "null", "  ", "\n"):
        found.setdefault(piece.encode())
    while len(found) < count - 1:
        kind = source.random()
        if kind < 0.85:
            word = "".join(source.choice(syllables) for _ in range(source.randint(1, 4)))
            text = (" " if source.random() < 0.5 else "") + (word.title() if source.random() < 0.2 else word)
        elif kind < 0.92:
            text = str(source.randrange(1000)) + source.choice(["", ",", ".", '"', "}"])
        else:
            text = "".join(chr(source.randint(0x4E00, 0x9FA5)) for _ in range(source.randint(1, 3)))
        found.setdefault(text.encode())
    return list(found)


def synthetic_vocabulary() -> Vocabulary:
    """The tokens as a grammar's compiler sees them; the last id ends a text."""
    tokens = synthetic_tokens()
    ids = {token: number for number, token in enumerate(tokens)}
    longest = max(map(len, tokens))

    def encode(text: str) -> list[int]:
        data, out = text.encode(), []
        while data:
            size = next(n for n in range(min(longest, len(data)), 0, -1) if data[:n] in ids)
            out.append(ids[data[:size]])
            data = data[size:]
        return out

    return Vocabulary(
        width=WIDTH,
        read_tokens=lambda: [*tokens, b""],
        special_ids=frozenset({WIDTH - 1}),
        eos_token_ids=(WIDTH - 1,),
        encode=encode,
    )


def wide_checkpoint(directory: Path) -> Path:
    """The model's files. Texts are encoded byte by byte; what is drawn may be any token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(0)
    random_qwen3(directory, SHAPE)
    letters = _letters()
    words = ["".join(letters[byte] for byte in token) for token in synthetic_tokens()]
    vocabulary = {word: number for number, word in enumerate([*words, END])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    backend.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


def _letters() -> dict[int, str]:
    """Byte -> letter of the byte-level alphabet: printable Latin-1 stands for itself, the rest for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}
