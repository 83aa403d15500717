"""From token ids to text one token at a time, giving what decoding all of them at once would give.

Nearly every decoder in use maps each token to bytes of its own; :class:`ByteDecoding` is that map, recognised from
the tokenizer's own description. Text then is one UTF-8 stream: a character appears with the token that completes
it, and U+FFFD stands for bytes as soon as they are known to be invalid (RFC 3629, maximal subparts).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's letters: printable Latin-1 stands for itself, the other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_ALPHABET: Mapping[str, int] = _byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; an added token with a letter outside the alphabet stands for itself."""
    try:
        return bytes([BYTE_ALPHABET[letter] for letter in token])
    except KeyError:
        return token.encode()


@attrs.frozen(kw_only=True)
class ByteDecoding:
    """A decoder that maps each token to bytes.

    Attributes:
        token_bytes: a token's bytes.
        first_token_bytes: the same for the first visible token of a text.
        strip_spaces: how many leading spaces the whole text loses at most.
        byte_fallback: whether tokens like ``<0xE6>`` stand for single bytes.
    """

    token_bytes: Callable[[str], bytes]
    first_token_bytes: Callable[[str], bytes]
    strip_spaces: int = 0
    byte_fallback: bool = False


def byte_decoding(decoder: Any) -> ByteDecoding | None:
    """How ``decoder`` (a ``tokenizers`` decoder or None) maps tokens to bytes; None if it is of another kind."""
    if decoder is None:
        return None
    steps = _steps(json.loads(decoder.__getstate__()))
    match [step["type"] for step in steps]:
        case ["ByteLevel"]:
            return ByteDecoding(token_bytes=byte_level_bytes, first_token_bytes=byte_level_bytes)
        case ["Metaspace"]:
            return _metaspace(steps[0])
        case _:
            return _replacing(steps)


def _steps(state: dict[str, Any]) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    return [step for part in state["decoders"] for step in _steps(part)]


def _metaspace(step: dict[str, Any]) -> ByteDecoding:
    marker = step["replacement"]

    def spaced(token: str) -> bytes:
        return token.replace(marker, " ").encode()

    def bare(token: str) -> bytes:
        return token.replace(marker, "").encode()

    return ByteDecoding(token_bytes=spaced, first_token_bytes=spaced if step["prepend_scheme"] == "never" else bare)


def _replacing(steps: list[dict[str, Any]]) -> ByteDecoding | None:
    """Sentencepiece's usual chain: Replace, ByteFallback, Fuse, Strip; any of them may be absent."""
    order = ["Replace", "ByteFallback", "Fuse", "Strip"]
    kinds = [step["type"] for step in steps]
    if not set(kinds) <= set(order) or kinds != sorted(set(kinds), key=order.index):
        return None
    by_kind = dict(zip(kinds, steps, strict=True))
    old, new = "", ""
    if "Replace" in by_kind:
        old, new = by_kind["Replace"]["pattern"].get("String", ""), by_kind["Replace"]["content"]
        if not old:
            return None
    strip = by_kind.get("Strip", {"content": " ", "start": 0, "stop": 0})
    # Without Fuse every token is stripped; that, and stripping the end, cannot be done token by token.
    if strip["content"] != " " or strip["stop"] or (strip["start"] and "Fuse" not in by_kind):
        return None
    fallback = "ByteFallback" in by_kind

    def token_bytes(token: str) -> bytes:
        if fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return (token.replace(old, new) if old else token).encode()

    return ByteDecoding(
        token_bytes=token_bytes,
        first_token_bytes=token_bytes,
        strip_spaces=strip["start"],
        byte_fallback=fallback,
    )


class Assembler(Protocol):
    """Turns visible tokens into text, one at a time."""

    def push(self, token_id: int) -> str:
        """The text that is certain now that ``token_id`` follows. Ids without a token give ``""``."""
        ...

    def flush(self) -> str:
        """U+FFFD for a character that was cut, else ``""``."""
        ...


class ByteAssembler:
    """Assembles tokens of a :class:`ByteDecoding`. ``known`` remembers bytes of tokens inside a text, for all."""

    def __init__(
        self, decoding: ByteDecoding, token_of: Callable[[int], str | None], known: dict[int, bytes] | None = None
    ) -> None:
        self._decoding = decoding
        self._token_of = token_of
        self._known = {} if known is None else known
        self._first_bytes = decoding.first_token_bytes
        self._is_first = self._at_start = True
        self._spaces_to_strip = decoding.strip_spaces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        data = None if self._at_start else self._known.get(token_id)
        return self._utf8.decode(self._bytes(token_id) if data is None else data)

    def _bytes(self, token_id: int) -> bytes:
        token = self._token_of(token_id)
        if token is None:
            return b""
        if not self._at_start:
            data = self._known[token_id] = self._decoding.token_bytes(token)
            return data
        data = (self._first_bytes if self._is_first else self._decoding.token_bytes)(token)
        self._is_first = False
        while self._spaces_to_strip and data:
            self._spaces_to_strip = self._spaces_to_strip - 1 if data[0] == 0x20 else 0
            data = data.removeprefix(b" ")
        self._at_start = self._spaces_to_strip > 0
        return data

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class PairAssembler:
    """Assembles tokens of a decoder that joins each token to the one before (word pieces, plain words)."""

    def __init__(self, decode: Callable[[list[int]], str], token_of: Callable[[int], str | None]) -> None:
        self._decode = decode
        self._token_of = token_of
        self._last: list[int] = []

    def push(self, token_id: int) -> str:
        if self._token_of(token_id) is None:
            return ""
        before = self._decode(self._last)
        after = self._decode([*self._last, token_id])
        self._last = [token_id]
        return after.removeprefix(before)

    def flush(self) -> str:
        return ""
