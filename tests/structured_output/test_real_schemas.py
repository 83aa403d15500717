"""Schemas that people wrote: valid documents are sentences of their grammars, invalid ones are not, and what is
generated is valid. An independent validator decides which are which."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import jsonschema
import pytest
from grammar_engines import LIBRARIES, constrained
from grammar_vocabularies import accepts_bytes, compiler, dumped, spec, start, walks
from keyword_suite import PAGE
from real_documents import Unmade, changed, document
from real_schemas import SOURCES, page_section, real_schemas, with_section
from test_validity import judged, judges, likely_llm, validator
from toys.checkpoints import ToyLLM

from deepinfer_core.api import InvalidRequestError

TRIES = 4


def valid_documents(schema: Any, source: random.Random, count: int) -> list[Any]:
    """Documents of a schema that the validator accepts; fewer where the maker finds none."""
    judge = jsonschema.Draft202012Validator(schema)
    made = []
    for _ in range(count):
        try:
            one = document(schema, source)
        except (Unmade, ValueError):  # ValueError: bounds that leave no number
            continue
        if judge.is_valid(one):
            made.append(one)
    return made


def taken(*libraries: str) -> list[Any]:
    found = []
    for one in real_schemas():
        try:
            compiler(*libraries, merged=False).compile(spec(json=one.schema))
        except InvalidRequestError:
            continue
        if judges(one.schema):
            found.append(one)
    return found


@pytest.mark.parametrize("libraries", [LIBRARIES, *((one,) for one in LIBRARIES)], ids=["routed", *LIBRARIES])
def test_documents_are_sentences_if_they_are_valid(libraries: tuple[str, ...]) -> None:
    seed = random.randrange(10**9)
    counts: Counter[str] = Counter()
    for one in taken(*libraries):
        source = random.Random(f"{seed} {one.name}")
        found = spec(json=one.schema)
        grammar = compiler(*libraries, merged=False).compile(found)
        judge = jsonschema.Draft202012Validator(one.schema)
        documents = valid_documents(one.schema, source, TRIES)
        counts["schemas"] += 1
        counts["schemas with documents"] += bool(documents)
        for made in documents:
            assert accepts_bytes(grammar, found, dumped(made)), (seed, one.name, dumped(made))
            for other in (changed(made, source) for _ in range(TRIES)):
                if not judge.is_valid(other):
                    assert not accepts_bytes(grammar, found, dumped(other)), (seed, one.name, dumped(other))
                    counts["invalid"] += 1
        counts["valid"] += len(documents)
    print(libraries, dict(counts))
    assert counts["schemas with documents"] > (200 if "llguidance" in libraries else 50), counts
    assert counts["invalid"] > counts["valid"] > 3 * counts["schemas with documents"] // 2, counts


def test_documents_walk_the_masks_of_a_vocabulary() -> None:
    """Tokens that overlap, where the test above goes byte by byte."""
    source = random.Random(11)
    walked = 0
    for one in taken()[::6]:
        for made in valid_documents(one.schema, source, 2):
            if len(text := dumped(made)) < 400:
                assert walks(start(*LIBRARIES, json=one.schema), text), (one.name, text)
                walked += 1
    assert walked > 30


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_generated_texts_are_valid(toy_llm: ToyLLM, every: int) -> None:
    llm = likely_llm(toy_llm)
    jobs = [
        (constrained(200, json=one.schema, seed=index, temperature=1 + index % 3 / 2), validator(one.schema))
        for index, one in enumerate(taken()[::every])
    ]
    counts = judged(llm, jobs)
    print(dict(counts))
    assert counts["stop"] > len(jobs) // 4, counts


def test_the_page_says_how_many_are_taken() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_section(page, page_section())


def test_every_source_is_there() -> None:
    counts = Counter(one.source for one in real_schemas())
    assert counts.keys() == SOURCES.keys()
    assert counts.total() > 350
