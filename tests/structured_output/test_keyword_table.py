"""The table that grammars are routed by is what the libraries do, and routing by it never gives the wrong language."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from deepinfer_structured_output.compiler import GrammarCompiler
from grammar_vocabularies import LIBRARIES, accepts_bytes, compiler, dumped, spec
from keyword_suite import (
    KNOWN_DIFFERENCES,
    PAGE,
    TABLE,
    measure,
    own_cases,
    page_section,
    suite_cases,
    table,
    takes_raw_control,
    with_section,
)

from deepinfer_core.api import InvalidRequestError


@pytest.fixture(scope="module")
def measured() -> Any:
    return measure()


def test_the_table_is_what_the_libraries_do(measured: Any) -> None:
    assert json.loads(TABLE.read_text(encoding="utf-8")) == table(measured)


def test_the_page_shows_it(measured: Any) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_section(page, page_section(measured))


@pytest.mark.parametrize("libraries", [LIBRARIES, ("llguidance",), ("xgrammar",)], ids=["routed", *LIBRARIES])
def test_whatever_is_not_refused_is_enforced(libraries: tuple[str, ...]) -> None:
    """Every schema of the public suite: no invalid document is ever a sentence of its grammar."""
    one: GrammarCompiler = compiler(*libraries, merged=False)
    counts: Counter[str] = Counter()
    for case in (*suite_cases(), *own_cases()):
        try:
            found = spec(json=case.schema)
            one.check(found)
            grammar = one.compile(found)
        except InvalidRequestError:
            counts["refused"] += 1
            continue
        counts["taken"] += 1
        for data, valid in case.documents:
            if not valid and accepts_bytes(grammar, found, dumped(data)):
                assert (case.subjects[0], dumped(data)) in KNOWN_DIFFERENCES, (case.source, data)
            counts["documents"] += 1
        assert not takes_raw_control(grammar, found), case.source
    assert counts["taken"] > (40 if libraries == ("xgrammar",) else 185), counts


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
        ({"not": {"const": 1}}, "'not'"),
        ({"if": {"const": 1}, "then": True, "else": False}, "'if', 'then', 'else'"),
        ({"type": "object", "properties": {"a": {"type": "array", "contains": {"const": 1}}}}, "'contains'"),
        ({"type": "string", "format": "my-own"}, "'format: my-own'"),
        ({"$ref": "https://example.com/other.json"}, "is not present in a registry"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
        ({"type": "object", "madeUp": 3}, "'madeUp'"),
        ({"type": "string", "format": "date", "pattern": "^2"}, "format 'date' beside pattern"),
        ({"type": "object", "properties": [1]}, r"properties=\[1\]: expected an object"),
        ({"items": 3}, "3: expected a schema"),
    ],
)
def test_a_keyword_that_nobody_enforces_is_named_at_once(schema: Any, named: str) -> None:
    found = spec(json=schema)
    with pytest.raises(InvalidRequestError, match=named):
        compiler().compile(found)


def test_deep_schemas_are_refused_before_any_library_walks_them() -> None:
    schema: Any = {"type": "integer"}
    for _ in range(80):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidRequestError, match="deeper than 64 schemas"):
        compiler().check(spec(json=schema))


def test_what_one_library_lacks_another_one_does() -> None:
    schema = {
        "type": "object",
        "propertyNames": {"enum": ["ab", "cd"]},
        "additionalProperties": {"type": "integer"},
    }
    assert compiler().compile(spec(json=schema)).library == "xgrammar"
    assert compiler().compile(spec(json={"type": "integer"})).library == "llguidance"
    with pytest.raises(InvalidRequestError, match="'propertyNames': not enforced by llguidance"):
        compiler("llguidance").check(spec(json=schema))


def test_annotations_and_foreign_options_do_not_reach_a_library() -> None:
    schema = {
        "title": "T",
        "description": "d",
        "x-guidance": {"lenient": True, "coerce_one_of": True},
        "type": "array",
        "examples": [1],
        "items": {"type": "integer", "default": 3, "x-order": 1},
        "maxItems": 1,
    }
    found = spec(json=schema)
    grammar = compiler(merged=False).compile(found)
    assert accepts_bytes(grammar, found, "[7]")
    assert not accepts_bytes(grammar, found, "[7, 7]")
    with pytest.raises(InvalidRequestError, match="uniqueItems"):
        compiler().check(spec(json=schema | {"uniqueItems": True, "maxItems": 2}))


@pytest.mark.parametrize("said", [{"uniqueItems": False}, {"uniqueItems": True, "maxItems": 1}])
def test_uniqueness_that_leaves_out_no_document_needs_nobody(said: Any) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, **said}
    for library in LIBRARIES:
        found = spec(json=schema)
        assert accepts_bytes(compiler(library, merged=False).compile(found), found, "[7]")
