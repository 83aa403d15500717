"""Grammars through llguidance: an Earley parser over derivative-based lexers, everything computed on demand.

It refuses JSON Schema keywords that it does not implement, and has bounds of its own on the work of one step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import llguidance
import llguidance.gbnf_to_lark
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance._lib import LLParserLimits

from deepinfer_core.api import ConstraintSpec, Vocabulary

from .schema import SINGLE_SPACES, alternatives, tags_of
from .settings import GrammarSettings
from .state import GrammarState, Row, TokenSets

LIMITS: Mapping[str, Any] = {"max_grammar_size": 200_000, "max_lexer_states": 50_000, "verbose_errors": False}
"""About 100 MB of automaton states for a grammar at worst; the library's defaults are five times that."""


class LLGuidanceMatcher:
    library: ClassVar[str] = "llguidance"

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    def take(self, tokens: list[int]) -> int:
        taken = self.matcher.try_consume_tokens(tokens)
        self._check()
        return taken

    def back(self, count: int) -> None:
        if not self.matcher.rollback(count):
            raise RuntimeError(_one_line(self.matcher.get_error()))

    def write(self, row: Row) -> None:
        self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._check()

    def is_complete(self) -> bool:
        return self.matcher.is_accepting()

    def is_finished(self) -> bool:
        return self.matcher.is_accepting() and self.matcher.is_stopped()

    def forced(self) -> Sequence[int]:
        return self.matcher.compute_ff_tokens()

    def _check(self) -> None:
        if self.matcher.is_error():
            raise RuntimeError(_one_line(self.matcher.get_error()))


@attrs.frozen
class Compiled:
    """``prototype`` has consumed nothing and is copied for each completion."""

    prototype: LLMatcher
    sets: TokenSets
    nbytes: int

    def matcher(self) -> GrammarState:
        return GrammarState(LLGuidanceMatcher(self.prototype.deep_copy()), self.sets)


class _Encoder:
    """The tokenizer as the library wants it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, tokens: Sequence[bytes]) -> None:
        self.eos_token_id = vocabulary.eos_token_ids[0] if vocabulary.eos_token_ids else 0
        self.tokens = [*tokens, *[b""] * (vocabulary.width - len(tokens))]
        self.special_token_ids = sorted(vocabulary.special_ids)
        self._encode = vocabulary.encode
        self._ids = {token: number for number, token in reversed(list(enumerate(tokens))) if token}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        ids = list(self._encode(data.decode(errors="replace")))
        if b"".join(self.tokens[i] for i in ids) == data:
            return ids
        return self._greedy(data)  # a tokenizer that adds or changes something around a text

    def _greedy(self, data: bytes) -> list[int]:
        ids, start = [], 0
        while start < len(data):
            lengths = range(min(self._longest, len(data) - start), 0, -1)
            length = next((n for n in lengths if data[start : start + n] in self._ids), 0)
            if not length:
                break
            ids.append(self._ids[data[start : start + length]])
            start += length
        return ids


def _lark(grammar: str) -> str:
    """EBNF in the library's own form.

    Raises:
        ValueError: it cannot be read; its reader raises plain exceptions.
    """
    try:
        return llguidance.gbnf_to_lark.gbnf_to_lark(grammar)
    except Exception as error:
        raise ValueError(_one_line(str(error))) from None


class LLGuidance:
    """Compiles and fills. Made once per engine, when it is first needed."""

    name = "llguidance"

    def __init__(
        self, vocabulary: Vocabulary, tokens: Sequence[bytes], sets: TokenSets, settings: GrammarSettings
    ) -> None:
        self._sets = sets
        self._any_whitespace = settings.whitespace == "any"
        ends: Any = list(vocabulary.eos_token_ids)
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Encoder(vocabulary, tokens)), n_vocab=vocabulary.width, eos_token=ends or None
        )
        self._executor = LLExecutor(num_threads=settings.mask_threads)

    def compile(self, spec: ConstraintSpec) -> Compiled:
        grammar = self._grammar(spec)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        if matcher.is_error():
            raise ValueError(_one_line(matcher.get_error()))
        row = np.zeros(len(self._sets.text), np.int32)
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if matcher.is_error():
            raise ValueError(f"no text satisfies it, or it is too large: {_one_line(matcher.get_error())}")
        if not (row & self._sets.text).any():
            raise ValueError("no text satisfies it")
        return Compiled(matcher.deep_copy(), self._sets, nbytes=65536 + 64 * len(grammar))

    def fill(self, jobs: Sequence[tuple[GrammarState, int]], masks: np.ndarray[Any, Any]) -> None:
        """One row for each state, in the library's threads."""
        pairs = [(state.matcher.matcher, row) for state, row in jobs if isinstance(state.matcher, LLGuidanceMatcher)]
        self._executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, masks.shape[1] * 4, masks.shape[0])
        for matcher, _ in pairs:
            if matcher.is_error():
                raise RuntimeError(_one_line(matcher.get_error()))

    def _grammar(self, spec: ConstraintSpec) -> str:
        match spec.kind:
            case "json":
                return LLMatcher.grammar_from_json_schema(spec.text, overrides=self._json_options())
            case "json_object":
                return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=self._json_options())
            case "regex":
                return LLMatcher.grammar_from_regex(spec.text)
            case "choice":
                return LLMatcher.grammar_from_regex(alternatives(json.loads(spec.text)))
            case "ebnf":
                return LLMatcher.grammar_from_lark(_lark(spec.text))
            case "structural_tags":
                return self._tags(spec)

    def _json_options(self) -> Any:
        """Given as overrides, so that nothing in a schema can switch them."""
        spacing: dict[str, Any] = {"whitespace_flexible": True}
        if not self._any_whitespace:
            item, key = SINGLE_SPACES
            spacing = {"whitespace_flexible": False, "item_separator": item, "key_separator": key}
        return {**spacing, "coerce_one_of": False, "lenient": False}

    def _tags(self, spec: ConstraintSpec) -> str:
        """Free text is a lazy lexeme that stops at the first trigger; tags that share one differ in what follows."""
        lines = ["start: (" + " | ".join(f"t{i}" for i, _ in enumerate(tags_of(spec))) + ")* TEXT", "TEXT: /(.|\\n)*/"]
        for index, (trigger, tags) in enumerate(tags_of(spec)):
            bodies = []
            for tag in tags:
                schema = {"x-guidance": self._json_options(), **({} if tag["schema"] is True else tag["schema"])}
                parts = [tag["begin"][len(trigger) :], f"%json {json.dumps(schema)}", tag["end"]]
                bodies.append(" ".join((_quoted(parts[0]), parts[1], _quoted(parts[2]))))
            lines.append(f"h{index}[lazy]: TEXT {_quoted(trigger)}")
            lines.append(f"t{index}: h{index} (" + " | ".join(bodies) + ")")
        return LLMatcher.grammar_from_lark("\n".join(lines) + "\n")


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


def _one_line(text: str) -> str:
    return " ".join(text.split())[:400]
