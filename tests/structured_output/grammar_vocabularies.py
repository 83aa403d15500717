"""Small vocabularies and states over them, without an engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from deepinfer_structured_output.compiler import Grammar, GrammarCompiler
from deepinfer_structured_output.settings import GrammarSettings

from deepinfer_core import SamplingParams
from deepinfer_core.api import ConstraintSpec, ConstraintState, MaskJob, Vocabulary

EOS = 256
PIECES = (
    b"ab",
    b"foo ",
    b'{"',
    b'": ',
    b'", "',
    b"name",
    b'{"name": "',
    b"12",
    b"true",
    b"null",
    b", ",
    b"}]",
    b"the ",
)
"""Text of the ids after :data:`EOS`; longer ones overlap shorter ones on purpose."""
TOKENS = (*(bytes([byte]) for byte in range(256)), b"<|end|>", *PIECES)
WIDTH = 320
LIBRARIES = ("llguidance", "xgrammar")


def encode(text: str) -> list[int]:
    """Longest match first."""
    data, ids = text.encode(), []
    while data:
        best = max(
            (t for t in range(len(TOKENS)) if t != EOS and data.startswith(TOKENS[t])), key=lambda t: len(TOKENS[t])
        )
        ids.append(best)
        data = data[len(TOKENS[best]) :]
    return ids


def vocabulary(tokens: Sequence[bytes] = TOKENS, width: int = WIDTH) -> Vocabulary:
    return Vocabulary(
        width=width,
        read_tokens=lambda: [b"" if token == EOS else text for token, text in enumerate(tokens)],
        special_ids=frozenset({EOS}),
        eos_token_ids=(EOS,),
        encode=encode if tokens is TOKENS else lambda text: list(text.encode()),
    )


BYTES = TOKENS[: EOS + 1]


@cache
def compiler(*libraries: str, whitespace: Any = "single", merged: bool = True) -> GrammarCompiler:
    words = vocabulary() if merged else vocabulary(BYTES, 257)
    return GrammarCompiler(libraries or LIBRARIES, GrammarSettings(whitespace=whitespace, mask_threads=2), words)


@cache
def filler() -> GrammarCompiler:
    """One that has opened both libraries, and so can fill masks of any state over the same vocabulary."""
    one = compiler()
    for library in LIBRARIES:
        one.compile(spec(**({"ebnf": 'root ::= "a"'} if library == "xgrammar" else {"regex": "a"})))
    return one


def spec(**structured_outputs: Any) -> ConstraintSpec:
    found = SamplingParams(structured_outputs=structured_outputs).structured_outputs
    assert found is not None
    return found


def grammar(*libraries: str, merged: bool = True, **structured_outputs: Any) -> Grammar:
    found = spec(**structured_outputs)
    one = compiler(*libraries, merged=merged)
    one.check(found)
    return one.compile(found)


def start(*libraries: str, **structured_outputs: Any) -> ConstraintState:
    return grammar(*libraries, **structured_outputs).start(spec(**structured_outputs))


def open_ids(state: ConstraintState, drafts: Sequence[int] = (), *, width: int = WIDTH) -> list[list[int]]:
    """Ids that each row of a draft path leaves open; rows nobody fills have all of them."""
    masks = np.full((1 + len(drafts), -(-width // 32)), -1, np.int32)
    filler().fill([MaskJob(state, 0, drafts)], masks)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [np.nonzero(row)[0].tolist() for row in bits]


def texts(ids: Sequence[int]) -> list[bytes]:
    return sorted(TOKENS[i] if i < len(TOKENS) else b"?" for i in ids)


def walks(state: ConstraintState, text: bytes | str, failed: set[tuple[int, tuple[int, ...]]] | None = None) -> bool:
    """Whether masks lead through a text to its end, by whichever tokens they allow: the longest first.

    A path may end where another one goes on, so shorter tokens are tried too; ``failed`` remembers where.
    """
    data = text.encode() if isinstance(text, str) else text
    failed = set() if failed is None else failed
    if not data:
        return state.is_complete
    opened = open_ids(state)[0]
    place = (len(data), tuple(opened))
    if place in failed:
        return False
    for token in sorted((i for i in opened if i != EOS and data.startswith(TOKENS[i])), key=lambda i: -len(TOKENS[i])):
        assert state.accept([token]) == 1
        if walks(state, data[len(TOKENS[token]) :], failed):
            return True
        state.rollback(1)
    failed.add(place)
    return False


def accepts_bytes(grammar: Grammar, found: ConstraintSpec, text: str) -> bool:
    """Whether a text is a sentence, byte by byte: no vocabulary is in the way."""
    state = grammar.start(found)
    data = list(text.encode("utf-8", "surrogatepass"))
    return state.accept(data) == len(data) and state.is_complete


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
