"""The compiler that the engine talks to."""

from __future__ import annotations

import importlib
import importlib.util
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import numpy as np

from deepinfer_core.api import ConfigError, ConstraintSpec, ConstraintState, InvalidRequestError, MaskJob, Vocabulary

from . import productive_ebnf
from .productive_schema import check_productive, without_unproductive
from .routing import LIBRARIES, libraries_for, schemas_of
from .schema import simplified
from .settings import GrammarSettings
from .state import GrammarState, TokenSets
from .trigger import TriggeredState


class Compiled(Protocol):
    @property
    def nbytes(self) -> int: ...

    def matcher(self) -> GrammarState: ...


class Library(Protocol):
    """A grammar library behind one shape."""

    def compile(self, spec: ConstraintSpec) -> Compiled: ...

    def fill(self, jobs: Sequence[tuple[GrammarState, int]], masks: np.ndarray[Any, Any]) -> None: ...


_CLASSES = {"llguidance": ("via_llguidance", "LLGuidance"), "xgrammar": ("via_xgrammar", "XGrammar")}


@attrs.frozen
class Grammar:
    """A compiled grammar, and the library that fills its masks."""

    library: str
    compiled: Compiled
    sets: TokenSets

    @property
    def nbytes(self) -> int:
        return self.compiled.nbytes

    def start(self, spec: ConstraintSpec) -> ConstraintState:
        if not spec.trigger_token_ids:
            return self.compiled.matcher()
        return TriggeredState(spec.trigger_token_ids, spec.bound_token_id, self.compiled.matcher, self.sets)


class GrammarCompiler:
    """Checks at once, compiles in whatever thread it is called, fills rows in the libraries' threads.

    The libraries are imported, and told the vocabulary, when they are first needed: that takes seconds.
    """

    def __init__(self, libraries: Sequence[str], settings: GrammarSettings | None, vocabulary: Vocabulary) -> None:
        self._names = [name for name in libraries if importlib.util.find_spec(name) is not None]
        if not self._names:
            extras = " or ".join(f"'deepinfer-structured-output[{name}]'" for name in libraries)
            raise ConfigError(f"structured output needs {' or '.join(libraries)}: pip install {extras}")
        self._settings = settings or GrammarSettings()
        self._vocabulary = vocabulary
        self._sets: TokenSets | None = None
        self._tokens: Sequence[bytes] = ()
        self._libraries: dict[str, Library] = {}
        self._opening = threading.Lock()

    def check(self, spec: ConstraintSpec) -> None:
        self._names_for(spec)

    def compile(self, spec: ConstraintSpec) -> Grammar:
        names = self._names_for(spec)
        prepared = _prepared(spec)
        reasons = []
        for name in names:
            library, sets = self._library(name)
            try:
                return Grammar(name, library.compile(prepared), sets)
            except ValueError as error:
                reasons.append(f"{error} ({name})")
        raise InvalidRequestError(f"{_KIND_WORDS[spec.kind]} {_begin(spec.text)}: {'; '.join(reasons)}")

    def _names_for(self, spec: ConstraintSpec) -> list[str]:
        """Libraries that enforce a grammar, which has an end."""
        names = libraries_for(spec, self._names)
        if spec.kind == "ebnf":
            productive_ebnf.check_productive(spec.text)
        for schema in schemas_of(spec):
            check_productive(schema)
        return names

    def fill(self, jobs: Sequence[MaskJob], masks: np.ndarray[Any, Any]) -> None:
        assert self._sets is not None
        whole: dict[str, list[tuple[GrammarState, int]]] = {}
        for job in jobs:
            state = job.state
            assert isinstance(state, GrammarState | TriggeredState)
            if isinstance(state, GrammarState) and not job.drafts and not state.ended:
                whole.setdefault(state.matcher.library, []).append((state, job.row))
            else:
                fill_path(state, job.drafts, masks, job.row)
        for name, states in whole.items():
            self._libraries[name].fill(states, masks)
            rows = [row for _, row in states]
            masks[rows] &= self._sets.text

    def close(self) -> None:
        self._libraries.clear()

    def _library(self, name: str) -> tuple[Library, TokenSets]:
        with self._opening:
            if self._sets is None:
                self._tokens = self._vocabulary.read_tokens()
                self._sets = TokenSets.of(self._vocabulary, self._tokens)
            if name not in self._libraries:
                module, attribute = _CLASSES[name]
                make: Callable[..., Library] = getattr(importlib.import_module(f".{module}", __package__), attribute)
                self._libraries[name] = make(self._vocabulary, self._tokens, self._sets, self._settings)
            return self._libraries[name], self._sets


_KIND_WORDS = {
    "json": "JSON Schema",
    "json_object": "JSON object",
    "regex": "regular expression",
    "ebnf": "EBNF grammar",
    "choice": "choice",
    "structural_tags": "structural tags",
}


def fill_path(
    state: GrammarState | TriggeredState, drafts: Sequence[int], masks: np.ndarray[Any, Any], row: int
) -> None:
    """The mask of the next token, and of each one after a draft, up to the first draft that is illegal or the last."""
    taken = 0
    try:
        while not state.ended:
            state.write(masks[row + taken])
            if taken == len(drafts) or not state.accept(drafts[taken : taken + 1]):
                break
            taken += 1
    finally:
        state.rollback(taken)


def _prepared(spec: ConstraintSpec) -> ConstraintSpec:
    """JSON Schemas without what no library has to see."""

    def prepared(schema: Any) -> Any:
        return simplified(without_unproductive(schema))

    if spec.kind == "json":
        return attrs.evolve(spec, text=json.dumps(prepared(json.loads(spec.text)), ensure_ascii=False))
    if spec.kind == "structural_tags":
        tags = json.loads(spec.text)
        tags["structures"] = [{**tag, "schema": prepared(tag["schema"])} for tag in tags["structures"]]
        return attrs.evolve(spec, text=json.dumps(tags, ensure_ascii=False))
    return spec


def _begin(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "...")


def routed(settings: GrammarSettings | None, vocabulary: Vocabulary) -> GrammarCompiler:
    """For each grammar the library that enforces all of it."""
    return GrammarCompiler(LIBRARIES, settings, vocabulary)


def only_llguidance(settings: GrammarSettings | None, vocabulary: Vocabulary) -> GrammarCompiler:
    return GrammarCompiler(("llguidance",), settings, vocabulary)


def only_xgrammar(settings: GrammarSettings | None, vocabulary: Vocabulary) -> GrammarCompiler:
    return GrammarCompiler(("xgrammar",), settings, vocabulary)
