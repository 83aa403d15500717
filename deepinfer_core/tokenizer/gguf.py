"""A tokenizer from GGUF metadata: byte-level BPE."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from deepinfer_core.api import CheckpointError
from deepinfer_core.checkpoint import GGUFMetadata

from .tokenizer import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

# Words with at most one leading space or mark, digits, runs of marks, line ends, other white space.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@attrs.frozen(kw_only=True)
class _Splitting:
    """What ``tokenizer.ggml.pre`` stands for.

    Attributes:
        build: makes the step that splits a text into words, before bytes become letters.
        byte_level_words: whether the byte-level step then splits further, by its own pattern.
        nfc: whether text is composed first (Unicode NFC).
        whole_words_first: whether a word that is a token is taken whole, whatever the merges say.
        adds_bos: whether BOS is added when the metadata do not say.
    """

    build: Callable[[], pre_tokenizers.PreTokenizer]
    byte_level_words: bool = False
    nfc: bool = False
    whole_words_first: bool = False
    adds_bos: bool = False


def _split(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    return lambda: pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")


_SPLITTINGS: Mapping[str, _Splitting] = {
    "smollm": _Splitting(build=lambda: pre_tokenizers.Digits(individual_digits=True), byte_level_words=True),
    "qwen2": _Splitting(build=_split(_WORDS % ""), nfc=True),
    "llama-bpe": _Splitting(build=_split(_WORDS % "{1,3}"), whole_words_first=True, adds_bos=True),
}


def load_gguf(metadata: GGUFMetadata) -> Tokenizer | None:
    """The tokenizer stored in a GGUF file; None when it has none.

    Raises CheckpointError for a kind that is not read, naming it and those that are.
    """
    model = metadata.get("tokenizer.ggml.model", "none")
    if model in ("none", "no_vocab"):
        return None
    if model != "gpt2":
        raise CheckpointError(
            f"{metadata.path}: tokenizer model {model!r} cannot be read from GGUF (only byte-level BPE, 'gpt2'); use "
            "the checkpoint's safetensors directory with tokenizer.json"
        )
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _SPLITTINGS:
        raise CheckpointError(
            f"{metadata.path}: tokenizer.ggml.pre is {pre!r}, known are {', '.join(_SPLITTINGS)}; use the "
            "checkpoint's safetensors directory with tokenizer.json"
        )
    splitting = _SPLITTINGS[pre]
    tokens: list[str] = metadata.require("tokenizer.ggml.tokens")
    backend = _byte_level_bpe(metadata, tokens, splitting)
    roles = _roles(metadata, tokens)
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", splitting.adds_bos)
    adds_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    _surround(
        backend,
        before=roles.get("bos_token") if adds_bos else None,
        after=roles.get("eos_token") if adds_eos else None,
    )
    ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return Tokenizer(
        backend,
        eos_token_ids=[int(token_id) for token_id in ends if token_id is not None],
        special_tokens=roles,
        chat_templates=_chat_templates(metadata),
    )


def _byte_level_bpe(metadata: GGUFMetadata, tokens: list[str], splitting: _Splitting) -> tokenizers.Tokenizer:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError(f"{metadata.path}: tokenizer.ggml.tokens lists a token twice; the file is damaged")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.require("tokenizer.ggml.merges")]
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=splitting.whole_words_first)
    except Exception as error:  # the library raises plain Exception, e.g. for a merge of unknown tokens
        raise CheckpointError(f"{metadata.path}: tokenizer.ggml.merges do not fit the tokens ({error})") from error
    backend = tokenizers.Tokenizer(model)
    if splitting.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            splitting.build(),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.byte_level_words),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, metadata.get("tokenizer.ggml.token_type", []), strict=False):
        if kind in (_CONTROL, _USER_DEFINED):
            added = tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
            backend.add_tokens([added])
    return backend


def _surround(backend: tokenizers.Tokenizer, *, before: str | None, after: str | None) -> None:
    """Make ``backend`` put token ``before`` in front of a text and ``after`` behind it."""
    tokens = [token for token in (before, after) if token is not None]
    single = [token for token in (before, "$A", after) if token is not None]
    backend.post_processor = TemplateProcessing(
        single=single, special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(tokens)]
    )


def _roles(metadata: GGUFMetadata, tokens: list[str]) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    roles = {}
    for role, key in keys.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise CheckpointError(f"{metadata.path}: {key}_token_id is {token_id}, of {len(tokens)} tokens")
        roles[role] = tokens[token_id]
    return roles


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    templates = {name: metadata[f"{prefix}.{name}"] for name in metadata.get("tokenizer.chat_templates", [])}
    if prefix in metadata:
        templates["default"] = metadata[prefix]
    return templates
