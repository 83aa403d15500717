"""Small tokenizers of every kind the tests need, built with the library itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from checkpoint_support import write_directory
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers.convert_slow_tokenizer import bytes_to_unicode

from deepinfer_core.checkpoint import open_checkpoint
from deepinfer_core.tokenizer import Tokenizer, load_tokenizer

LETTER_OF: Mapping[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]  # byte -> letter, as GPT-2 defined it
EOS = "<|end|>"
CONFIG: Mapping[str, str] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
SAMPLE = (
    "the quick brown fox jumps over the lazy dog; 木村さん ate 12 crème brûlées 🍎 and naïve façades. "
    "return self.value + other.value\n\tif x == 3:\n" * 4
)


def id_of(backend: tokenizers.Tokenizer, token: str) -> int:
    """The id of a token that is there."""
    token_id = backend.token_to_id(token)
    assert token_id is not None
    return token_id


def letters(data: bytes) -> str:
    """``data`` as a byte-level vocabulary spells it."""
    return "".join(LETTER_OF[byte] for byte in data)


def byte_level_of(tokens: Sequence[bytes], special: Sequence[str] = (EOS,)) -> tokenizers.Tokenizer:
    """A byte-level tokenizer whose token i is ``tokens[i]``, then the special tokens. For decoding."""
    vocabulary = {letters(data): index for index, data in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return backend


def trained_byte_level() -> tokenizers.Tokenizer:
    """256 bytes, merges learnt from :data:`SAMPLE`, a special token, an added token with letters of the alphabet."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=sorted(LETTER_OF.values()), special_tokens=[EOS], show_progress=False
    )
    backend.train_from_iterator([SAMPLE], trainer)
    backend.add_tokens([AddedToken("<tool é>", special=False, normalized=False), "ü"])
    return backend


def _sentencepiece_model() -> models.BPE:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", *"abcdefghijklmnopqrstuvwxyz .,木", "▁a", "▁b", "th", "▁th", "é"]
    merges = [("▁", "▁"), ("▁", "a"), ("▁", "b"), ("t", "h"), ("▁", "th")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    return models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2: byte tokens for what is not in the vocabulary, one leading space stripped, BOS added."""
    backend = tokenizers.Tokenizer(_sentencepiece_model())
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>")])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def metaspace(scheme: str = "always") -> tokenizers.Tokenizer:
    """As T5: a Metaspace pre-tokenizer and decoder, no byte tokens decoded."""
    backend = tokenizers.Tokenizer(_sentencepiece_model())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>")])
    return backend


def word_pieces() -> tokenizers.Tokenizer:
    """As BERT: pieces joined with spaces unless they begin with ``##``."""
    pieces = ["[UNK]", "[SEP]", "play", "##ing", "##ed", "the", "cat", ".", ",", "do", "n't", "##s"]
    backend = tokenizers.Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken("[SEP]", special=True, normalized=False)])
    return backend


def plain_words() -> tokenizers.Tokenizer:
    """No decoder at all: the library joins tokens with spaces."""
    words = {word: index for index, word in enumerate(["one", "two", "three", "<unk>"])}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


def load(directory: Path) -> Tokenizer:
    """The tokenizer of a checkpoint in ``directory``."""
    write_directory(directory, {"model.safetensors": {"a": torch.zeros(1)}})
    tokenizer = load_tokenizer(open_checkpoint(directory))
    assert tokenizer is not None
    return tokenizer


def wrapped(backend: tokenizers.Tokenizer, **options: Any) -> Tokenizer:
    return Tokenizer(backend, **options)


def save_tokenizer(directory: Path, backend: tokenizers.Tokenizer, config: Mapping[str, Any] | None = None) -> Path:
    """tokenizer.json and tokenizer_config.json in ``directory``."""
    directory.mkdir(exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **(config or {})}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory
