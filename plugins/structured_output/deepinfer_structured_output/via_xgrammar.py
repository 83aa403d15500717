"""Grammars through xgrammar: an Earley parser over bytes, with token masks precomputed for each of its states."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import numpy as np
import xgrammar

from deepinfer_core.api import ConstraintSpec, Vocabulary

from .schema import SINGLE_SPACES, tags_of
from .settings import GrammarSettings
from .state import GrammarState, Row, TokenSets
from .trigger import one_bit


class XGrammarMatcher:
    library: ClassVar[str] = "xgrammar"

    def __init__(self, matcher: xgrammar.GrammarMatcher, sets: TokenSets) -> None:
        self.matcher = matcher
        self._sets = sets

    def take(self, tokens: list[int]) -> int:
        for count, token in enumerate(tokens):
            if not self.matcher.accept_token(token):
                return count
        return len(tokens)

    def back(self, count: int) -> None:
        self.matcher.rollback(count)

    def write(self, row: Row) -> None:
        forced = self.forced()
        if forced:
            row[:] = 0
            one_bit(row, forced[0])
        else:
            row[:] = -1
            self.matcher.fill_next_token_bitmask(row[None], 0)

    def is_complete(self) -> bool:
        return bool(self.matcher.is_completed())

    def is_finished(self) -> bool:
        if not self.matcher.is_completed():
            return False
        row = np.full(len(self._sets.text), -1, np.int32)
        self.matcher.fill_next_token_bitmask(row[None], 0)
        row &= self._sets.text
        return int(np.bitwise_count(row.view(np.uint32)).sum()) == len(self._sets.ends)

    def forced(self) -> Sequence[int]:
        return self.matcher.find_jump_forward_tokens()


@attrs.frozen
class Compiled:
    grammar: xgrammar.CompiledGrammar
    sets: TokenSets
    nbytes: int

    def matcher(self) -> GrammarState:
        return GrammarState(XGrammarMatcher(xgrammar.GrammarMatcher(self.grammar), self.sets), self.sets)


class XGrammar:
    """Compiles and fills. Made once per engine, when it is first needed."""

    name = "xgrammar"

    def __init__(
        self, vocabulary: Vocabulary, tokens: Sequence[bytes], sets: TokenSets, settings: GrammarSettings
    ) -> None:
        self._sets = sets
        self._any_whitespace = settings.whitespace == "any"
        info = xgrammar.TokenizerInfo(
            list(tokens),
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=vocabulary.width,
            stop_token_ids=list(vocabulary.eos_token_ids),
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=settings.mask_threads)

    def compile(self, spec: ConstraintSpec) -> Compiled:
        try:
            grammar = self._grammar(spec)
        except RuntimeError as error:
            raise ValueError(_reason(error)) from None
        compiled = Compiled(grammar, self._sets, nbytes=int(grammar.memory_size_bytes))
        row = np.zeros(len(self._sets.text), np.int32)
        compiled.matcher().write(row)
        if not row.any():
            raise ValueError("no text satisfies it")
        return compiled

    def fill(self, jobs: Sequence[tuple[GrammarState, int]], masks: np.ndarray[Any, Any]) -> None:
        """One row for each state, in the library's threads; forced tokens need none of its work."""
        open_rows, matchers = [], []
        for state, row in jobs:
            matcher = state.matcher
            assert isinstance(matcher, XGrammarMatcher)
            forced = matcher.forced()
            if forced:
                masks[row] = 0
                one_bit(masks[row], forced[0])
            else:
                open_rows.append(row)
                matchers.append(matcher.matcher)
        if matchers:
            self._batch.batch_fill_next_token_bitmask(matchers, masks, open_rows)

    def _grammar(self, spec: ConstraintSpec) -> xgrammar.CompiledGrammar:
        match spec.kind:
            case "json":
                return self._schema(spec.text)
            case "json_object":
                return self._schema('{"type": "object"}')
            case "regex":
                return self._compiler.compile_regex(_checked(spec.text))
            case "choice":
                choices = " | ".join(_literal(choice) for choice in json.loads(spec.text))
                return self._compiler.compile_grammar(f"root ::= {choices}")
            case "ebnf":
                return self._compiler.compile_grammar(spec.text)
            case "structural_tags":
                return self._compiler.compile_structural_tag(self._tags(spec))

    def _schema(self, schema: str) -> xgrammar.CompiledGrammar:
        return self._compiler.compile_json_schema(
            schema,
            any_whitespace=self._any_whitespace,
            separators=None if self._any_whitespace else SINGLE_SPACES,
            strict_mode=False,
        )

    def _tags(self, spec: ConstraintSpec) -> dict[str, Any]:
        groups = tags_of(spec)
        tags = [
            {"begin": t["begin"], "content": {"type": "json_schema", "json_schema": t["schema"]}, "end": t["end"]}
            for _, group in groups
            for t in group
        ]
        triggers = [trigger for trigger, _ in groups]
        return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": triggers, "tags": tags}}


_UNSURE = re.compile(r"\\(?![dwsnrtfvxu\W_])(.)|\[\^[^\]]*\\[dws]")


def _checked(pattern: str) -> str:
    """A regular expression whose escapes mean here what they mean elsewhere: the library takes ones that it does not
    know for the letter itself, and its classes are of ASCII, so that their complements would be too large."""
    if found := _UNSURE.search(pattern):
        raise ValueError(f"{found[0]!r} at position {found.start()} is not known to mean the same here")
    return pattern


def _literal(text: str) -> str:
    return '"' + "".join(c if c.isalnum() and c.isascii() else f"\\U{ord(c):08x}" for c in text) + '"'


def _reason(error: RuntimeError) -> str:
    """The library's text without its own time and place."""
    text = re.sub(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ", "", str(error))
    return " ".join(text.split())[:400]
