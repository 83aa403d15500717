"""Grammars that no text can come to the end of are refused before they are queued, and named; others are not."""

from __future__ import annotations

import random
from typing import Any

import pytest
from deepinfer_structured_output.productive_ebnf import check_productive as check_ebnf
from deepinfer_structured_output.productive_schema import check_productive, without_unproductive
from ebnf_grammars import LANGUAGES
from grammar_vocabularies import LIBRARIES, compiler, open_ids, spec, start, walks
from hypothesis import given, settings
from hypothesis import strategies as st
from keyword_suite import suite_cases
from random_schemas import random_schema

from deepinfer_core.api import InvalidRequestError

ENDLESS_EBNF = [
    ('root ::= "a" root', "rule 'root'"),
    ("root ::= root", "rule 'root'"),
    ('root ::= "a" b\nb ::= "b" c | c\nc ::= b "c"', "rules 'root', 'b', 'c'"),
    ('root ::= "x" | bad\nbad ::= "a" bad', "rule 'bad'"),
    ('root ::= ("a" root)+', "rule 'root'"),
    ('root ::= ("a" | "b") (root | "c" root){1,3}', "rule 'root'"),
    ('root ::= [")"] root # "b"\n# comment | "c"\n', "rule 'root'"),
    ('root ::= "#" root', "rule 'root'"),
    ('root ::= "\\"|" root', "rule 'root'"),
]
ENDING_EBNF = [
    'root ::= "a" b{0}\nb ::= "b"',
    'root ::= "a" root | ""',
    'root ::= "a" root?',
    'root ::= "a" (root "b")*',
    'root ::= "a" (root){0,2}',
    'root ::= "a" b\nb ::= root | "b"',
    'root ::= "a"\nunused ::= "x" unused',
    'root ::= "a" |\n',
    'root ::= "#a" # "unclosed\n',
]


@pytest.mark.parametrize(("grammar", "named"), ENDLESS_EBNF)
def test_a_rule_without_an_end_is_named_at_once(grammar: str, named: str) -> None:
    for libraries in (LIBRARIES, ("llguidance",), ("xgrammar",)):
        with pytest.raises(InvalidRequestError, match=f"EBNF {named}: no text comes to an end"):
            compiler(*libraries).check(spec(ebnf=grammar))
        with pytest.raises(InvalidRequestError, match=named):
            compiler(*libraries).compile(spec(ebnf=grammar))


@pytest.mark.parametrize("grammar", [*ENDING_EBNF, *(language.ebnf for language in LANGUAGES)])
def test_rules_with_an_end_are_taken(grammar: str) -> None:
    check_ebnf(grammar)
    compiler().compile(spec(ebnf=grammar))


def test_what_is_not_read_is_left_to_its_library() -> None:
    for grammar in ('root ::= "a" (="b") root', 'root ::= ( "a" root', "root ::= 'a' root", ""):
        check_ebnf(grammar)


NAMES = ("root", "b", "c", "d")
REPEATS = {"": 1, "*": 0, "+": 1, "?": 0, "{0,2}": 0, "{2}": 2, "{1,}": 1}
"""Suffix -> how often its part has to appear."""

# A part is text, a rule's name, or (alternatives, suffix); an alternative is a list of parts.
Part = Any


def choices_of(inner: st.SearchStrategy[Part]) -> st.SearchStrategy[list[list[Part]]]:
    return st.lists(st.lists(inner, min_size=1, max_size=3), min_size=1, max_size=2)


texts_and_names: st.SearchStrategy[Part] = st.sampled_from(['"t"', "[a-z]", '"(|"', *NAMES])
parts = st.recursive(
    texts_and_names, lambda inner: st.tuples(choices_of(inner), st.sampled_from(list(REPEATS))), max_leaves=6
)
choices = choices_of(parts)


def written(alternatives: list[list[Part]]) -> str:
    def one(part: Part) -> str:
        return part if isinstance(part, str) else f"({written(part[0])}){part[1]}"

    return " | ".join(" ".join(map(one, sequence)) for sequence in alternatives)


def shortest(alternatives: list[list[Part]], known: dict[str, float]) -> float:
    """Length of the shortest text, given those of the rules; infinite where there is none."""

    def one(part: Part) -> float:
        if isinstance(part, str):
            return known.get(part, 1)
        times = REPEATS[part[1]]
        return times * shortest(part[0], known) if times else 0

    return min(sum(map(one, sequence)) for sequence in alternatives)


def names_in(alternatives: list[list[Part]]) -> set[str]:
    found = set()
    for part in (part for sequence in alternatives for part in sequence):
        found |= names_in(part[0]) if not isinstance(part, str) else {part} & set(NAMES)
    return found


def refused_rules(grammar: str) -> set[str]:
    try:
        check_ebnf(grammar)
    except InvalidRequestError as error:
        return {name for name in NAMES if repr(name) in str(error)}
    return set()


@settings(max_examples=200)
@given(bodies=st.lists(choices, min_size=len(NAMES), max_size=len(NAMES)))
def test_rules_without_an_end_are_those_whose_shortest_text_is_infinite(bodies: list[list[list[Part]]]) -> None:
    lengths = dict.fromkeys(NAMES, float("inf"))
    for _ in NAMES:
        lengths = {name: shortest(body, lengths) for name, body in zip(NAMES, bodies, strict=True)}
    reached, pending = set(), ["root"]
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += names_in(bodies[NAMES.index(name)])
    endless = {name for name in reached if lengths[name] == float("inf")}
    grammar = "\n".join(f"{name} ::= {written(body)}" for name, body in zip(NAMES, bodies, strict=True))
    assert refused_rules(grammar) == endless, grammar


# ---- JSON Schema

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
ENDLESS_SCHEMAS: list[tuple[Any, str]] = [
    ({"$ref": "#"}, "'#' needs '#' again"),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "'#' needs '#/properties/a' needs '#'"),
    ({"$ref": "#/$defs/node", "$defs": {"node": NODE}}, "'#/$defs/node' needs"),
    ({"type": ["array"], "items": {"$ref": "#"}, "minItems": 1}, "'#/items'"),
    ({"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 2}, "'#/prefixItems/1'"),
    ({"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["x"]}, "'#/additionalProperties'"),
    ({"anyOf": [{"$ref": "#/$defs/node"}, {"$ref": "#"}], "$defs": {"node": NODE}}, "'#/$defs/node'"),
    ({"allOf": [{"type": "object"}, {"$ref": "#/$defs/node"}], "$defs": {"node": NODE}}, "'#/$defs/node'"),
    (
        {"$ref": "#self", "$defs": {"a/b": {"$anchor": "self", "type": "array", "items": {"$ref": "#/$defs/a~1b"},
                                            "minItems": 1}}},
        "'#/$defs/a~1b'",
    ),
]  # fmt: skip
ENDING_SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "array", "items": {"$ref": "#"}},
    {"anyOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": 1}, {"type": "integer"}]},
    {"type": "object", "properties": {"a": False}},
    {"$ref": "#/$defs/missing"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$id": "http://x/", "properties": {"b": {"$ref": "#"}}, "required": ["b"]}}},
    True,
]


@pytest.mark.parametrize(("schema", "named"), ENDLESS_SCHEMAS)
def test_a_schema_that_needs_itself_is_refused_at_once(schema: Any, named: str) -> None:
    tags = {"structures": [{"begin": "<t>", "schema": schema, "end": "</t>"}], "triggers": ["<t>"]}
    for found in (spec(json=schema), spec(structural_tags=tags)):
        with pytest.raises(InvalidRequestError) as raised:
            compiler().check(found)
        assert named in str(raised.value)
        assert "no finite document satisfies it" in str(raised.value)


@pytest.mark.parametrize("schema", ENDING_SCHEMAS, ids=str)
def test_a_schema_that_may_end_is_left_as_it_is(schema: Any) -> None:
    check_productive(schema)
    assert without_unproductive(schema) == schema


def test_no_schema_with_a_valid_document_is_refused() -> None:
    for case in suite_cases():
        if any(valid for _, valid in case.documents):
            check_productive(case.schema)
    source = random.Random(5)
    for _ in range(300):
        check_productive(random_schema(source)[0])


def test_a_part_that_has_no_end_is_not_entered() -> None:
    """The document ``{}`` is valid; a property ``a`` could be begun and never be ended."""
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/node"}, "b": {"type": "integer"}},
        "additionalProperties": False,
        "$defs": {"node": NODE},
    }
    assert without_unproductive(schema)["properties"] == {"a": False, "b": {"type": "integer"}}
    assert walks(start(*LIBRARIES, json=schema), "{}")
    assert walks(start(*LIBRARIES, json=schema), '{"b": 7}')
    state = start(*LIBRARIES, json=schema)
    assert state.accept(list(b'{"')) == 2
    assert ord("a") not in open_ids(state)[0]
    either = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "boolean"}], "$defs": {"node": NODE}}
    assert walks(start(*LIBRARIES, json=either), "true")
    assert not walks(start(*LIBRARIES, json=either), '{"next": true}')
