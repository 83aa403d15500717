"""A grammar compiler in a few lines of Python: regular expressions, by partial matching of every token's text.

Slow, independent of every library that does this in earnest, and right by construction. Faults on demand: a pattern
that contains one of :data:`FAULTS` makes the place it names misbehave.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import regex

from deepinfer_core.api import (
    CompiledConstraint,
    ConstraintInfo,
    ConstraintSpec,
    InvalidRequestError,
    LazyRef,
    MaskJob,
    PluginInfo,
    Vocabulary,
    hookimpl,
)

FAULTS = ("(?#compile)", "(?#hang)", "(?#fill)", "(?#accept)", "(?#empty)", "(?#start)", "(?#huge)")
RELEASE = threading.Event()
"""Set to let patterns with ``(?#hang)`` compile."""


class PatternState:
    def __init__(self, compiled: Pattern) -> None:
        self.compiled = compiled
        self.tokens: list[int] = []
        self.ended = False

    @property
    def text(self) -> str:
        return self.compiled.text_of(self.tokens)

    @property
    def is_complete(self) -> bool:
        return self.compiled.pattern.fullmatch(self.text) is not None

    @property
    def is_finished(self) -> bool:
        return self.ended or (self.is_complete and not self.compiled.following(self.tokens))

    def accept(self, tokens: Sequence[int]) -> int:
        if "(?#accept)" in self.compiled.source:
            raise RuntimeError("accept fails as it was told to")
        for count, token in enumerate(tokens):
            if self.ended:
                return count
            if token in self.compiled.vocabulary.eos_token_ids:
                if not self.is_complete:
                    return count
                self.ended = True
            elif not self.compiled.allows(self.tokens, token):
                return count
            self.tokens.append(token)
        return len(tokens)

    def rollback(self, count: int) -> None:
        if count:
            self.ended = False
            del self.tokens[-count:]

    def forced(self, limit: int) -> list[int]:
        found: list[int] = []
        while len(found) < limit and not self.ended:
            following = self.compiled.following([*self.tokens, *found])
            if len(following) != 1 or self.compiled.pattern.fullmatch(self.compiled.text_of([*self.tokens, *found])):
                break
            found += following
        return found


class Pattern:
    nbytes = 100

    def __init__(self, source: str, vocabulary: Vocabulary, texts: Sequence[bytes]) -> None:
        self.source = source
        self.pattern = regex.compile(source)
        self.vocabulary = vocabulary
        self.texts = texts
        self._following: dict[str, list[int]] = {}
        if "(?#huge)" in source:
            self.nbytes = 10**12

    def start(self, spec: ConstraintSpec) -> PatternState:
        if "(?#start)" in self.source:
            raise RuntimeError("start fails as it was told to")
        return PatternState(self)

    def text_of(self, tokens: Sequence[int]) -> str:
        return b"".join(self.texts[t] for t in tokens if t < len(self.texts)).decode("latin-1")

    def allows(self, tokens: Sequence[int], token: int) -> bool:
        return token in self.following(tokens)

    def following(self, tokens: Sequence[int]) -> list[int]:
        text = self.text_of(tokens)
        if text not in self._following:
            self._following[text] = [
                token
                for token, added in enumerate(self.texts)
                if added and self.pattern.fullmatch(text + added.decode("latin-1"), partial=True)
            ]
        return self._following[text]


class PatternCompiler:
    def __init__(self, settings: Any, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.texts = vocabulary.read_tokens()
        self.compiled: list[str] = []
        self.fills: list[int] = []

    def check(self, spec: ConstraintSpec) -> None:
        if spec.kind != "regex":
            raise InvalidRequestError(f"structured_outputs: {spec.kind}: this compiler knows regular expressions only")

    def compile(self, spec: ConstraintSpec) -> CompiledConstraint:
        self.compiled.append(spec.text)
        if "(?#compile)" in spec.text:
            raise RuntimeError("compile fails as it was told to")
        if "(?#hang)" in spec.text:
            RELEASE.wait(30)
        return Pattern(spec.text, self.vocabulary, self.texts)

    def fill(self, jobs: Sequence[MaskJob], masks: np.ndarray[Any, Any]) -> None:
        self.fills.append(len(jobs))
        for job in jobs:
            state = job.state
            assert isinstance(state, PatternState)
            taken = 0
            for offset in range(1 + len(job.drafts)):
                masks[job.row + offset] = self.mask(state)
                if offset == len(job.drafts) or not state.accept([job.drafts[offset]]):
                    break
                taken += 1
                if state.ended:
                    break
            state.rollback(taken)
            if "(?#fill)" in state.compiled.source and len(state.tokens) >= 2:
                raise RuntimeError("fill fails as it was told to")

    def mask(self, state: PatternState) -> np.ndarray[Any, Any]:
        bits = np.zeros(-(-self.vocabulary.width // 32) * 32, bool)
        if "(?#empty)" not in state.compiled.source or len(state.tokens) < 2:
            bits[state.compiled.following(state.tokens)] = True
            bits[list(self.vocabulary.eos_token_ids)] = state.is_complete
        return np.packbits(bits, bitorder="little").view(np.int32)

    def close(self) -> None:
        pass


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name="grammar_plugin", help="Regular expressions for tests")


@hookimpl
def deepinfer_constraints() -> Sequence[ConstraintInfo]:
    return [
        ConstraintInfo(
            name="patterns",
            help="regular expressions, by partial matching",
            factory=LazyRef("toys.grammar_plugin:PatternCompiler"),
            priority=1,
        )
    ]
