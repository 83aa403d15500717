"""Toy checkpoints on disk, the byte-level tokenizer beside them, and engines over them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from deepinfer_core import LLM

ToyLLM = Callable[..., LLM]
"""The ``toy_llm`` fixture."""

ACCELERATOR = os.environ.get("TEST_ACCELERATOR", "cpu")
"""Backend that engines of the tests run on: any that is installed."""

EOS, EOS_ID = "<|end|>", 256
MERGED: tuple[bytes, ...] = (b"ab", b"foo ", b"ND bar", b"the ")
"""Text of the ids 257 to 260."""
TOKENIZER_IDS, PADDED_VOCAB = 261, 320

FULL: Mapping[str, int | None] = {"full": None}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "Count": {"vocab_size": 64},
    "Const": {"vocab_size": 16, "logits": {"3": 2.0, "5": 1.9, "7": 0.2}},
    "Flat": {"vocab_size": 64},
    "PrefixHash": {"vocab_size": 64},
    "Script": {"vocab_size": 64, "script": [0]},
}
SMALL: Mapping[str, Any] = {
    "kv_cache.block_size": 4,
    "kv_cache.num_blocks": 65,
    "scheduling.max_running": 16,
    "scheduling.max_batch_tokens": 64,
    "logging.progress": False,
    "logging.level": "error",
    "plugins.paths": ["toys.plugin"],
}
"""Settings that tests begin from."""


def _letters() -> dict[int, str]:
    """Byte -> letter of the byte-level alphabet: printable Latin-1 stands for itself, the rest for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}


def byte_tokenizer(merged: Sequence[bytes] = MERGED) -> tokenizers.Tokenizer:
    """Ids 0 to 255 are the bytes, 256 is EOS, then ``merged``, which no text is encoded to."""
    letters = _letters()
    vocabulary = {letters[byte]: byte for byte in range(256)} | {EOS: EOS_ID}
    for index, data in enumerate(merged, start=EOS_ID + 1):
        vocabulary["".join(letters[byte] for byte in data)] = index
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(EOS, special=True, normalized=False)])
    return backend


def write_toy(
    directory: Path,
    kind: str,
    *,
    tokenizer: bool | Sequence[bytes] = False,
    groups: Mapping[str, int | None] = FULL,
    max_len: int = 128,
    **config: Any,
) -> Path:
    """A toy's checkpoint. ``tokenizer``: True for the usual one, or the merged tokens it shall have."""
    directory.mkdir(parents=True, exist_ok=True)
    whole = {
        "architectures": [f"Toy{kind}"],
        "max_position_embeddings": max_len,
        "groups": dict(groups),
        **DEFAULTS[kind],
        **({"vocab_size": PADDED_VOCAB} if tokenizer else {}),
        **config,
    }
    (directory / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    save_file({"unused": torch.zeros(1)}, directory / "model.safetensors")
    if tokenizer:
        backend = byte_tokenizer(MERGED if tokenizer is True else tuple(tokenizer))
        backend.save(str(directory / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
        (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


def toy_settings(**settings: Any) -> dict[str, Any]:
    """:data:`SMALL` with changes; ``kv_cache__num_blocks=7`` stands for ``kv_cache.num_blocks``."""
    return {**SMALL, **{name.replace("__", "."): value for name, value in settings.items()}}


def open_toy(directory: Path, **settings: Any) -> LLM:
    return LLM(directory, accelerator=ACCELERATOR, **toy_settings(**settings))
