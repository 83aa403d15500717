"""What a request may say about the form of its text."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from deepinfer_core import SamplingParams
from deepinfer_core.api import ConstraintSpec, InvalidRequestError

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "café"}}}
TAGS = {"structures": [{"begin": "<f=g>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f="]}


def spec(**arguments: Any) -> ConstraintSpec:
    found = SamplingParams(**arguments).structured_outputs
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"json": SCHEMA}, "json", json.dumps(SCHEMA, ensure_ascii=False)),
        ({"json": json.dumps(SCHEMA, indent=2)}, "json", json.dumps(SCHEMA, ensure_ascii=False)),
        ({"json": True}, "json", "true"),
        ({"json_object": True}, "json_object", ""),
        ({"regex": "a+"}, "regex", "a+"),
        ({"ebnf": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"grammar": 'root ::= "a"', "json": None}, "ebnf", 'root ::= "a"'),
        ({"choice": ["x", "é", "x"]}, "choice", '["x", "é"]'),
        ({"structural_tags": TAGS}, "structural_tags", json.dumps(TAGS, ensure_ascii=False)),
    ],
)
def test_what_can_be_said(given: dict[str, Any], kind: str, text: str) -> None:
    found = spec(structured_outputs=given)
    assert (found.kind, found.text) == (kind, text)
    params = SamplingParams(structured_outputs=given)
    assert attrs.evolve(params, max_tokens=3).structured_outputs == found


def test_two_spellings_of_a_letter_are_one_schema() -> None:
    assert spec(structured_outputs={"json": '{"const": "caf\\u00e9"}'}) == spec(
        structured_outputs={"json": '{"const":"café"}'}
    )


def test_a_model_class_stands_for_its_schema() -> None:
    class Model:
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return SCHEMA

    assert spec(structured_outputs={"json": Model}) == spec(structured_outputs={"json": SCHEMA})


def test_the_original_engines_words() -> None:
    found = spec(so_args={"schema_type": "regex", "schema": "a", "trigger_token_ids": [5, 6], "bound_token_id": 4})
    assert found == ConstraintSpec(kind="regex", text="a", trigger_token_ids=(5, 6), bound_token_id=4)
    assert found.grammar == spec(structured_outputs={"regex": "a"}).grammar
    assert spec(so_args={"schema_type": "json", "schema": "{}"}) == spec(structured_outputs={"json": {}})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"structured_outputs": "a"}, "structured_outputs='a': expected a mapping"),
        ({"structured_outputs": {}}, "exactly one of json, json_object"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "exactly one of"),
        ({"structured_outputs": {"jsn": {}}}, "exactly one of"),
        ({"structured_outputs": {"json": "{"}}, r"structured_outputs\['json'\] is no JSON: .*, near '{'"),
        ({"structured_outputs": {"json": '{"a": 1, "type": }'}}, 'column 18 .*"type": }'),
        ({"structured_outputs": {"json": "[" * 100_000}}, "nests too deeply"),
        ({"structured_outputs": {"json": "[1]"}}, "expected a JSON Schema"),
        ({"structured_outputs": {"json": '{"minimum": NaN}'}}, "'NaN': expected a JSON number"),
        ({"structured_outputs": {"json": {"const": float("inf")}}}, "cannot be written as JSON"),
        ({"structured_outputs": {"json": {"const": "\ud800"}}}, "cannot be written as JSON"),
        ({"structured_outputs": {"json": {"const": "x" * 1_000_001}}}, "characters: expected at most 1000000"),
        ({"structured_outputs": {"json_object": False}}, "False: expected True"),
        ({"structured_outputs": {"regex": " "}}, "expected a non-empty string"),
        ({"structured_outputs": {"regex": 3}}, "3: expected a non-empty string"),
        ({"structured_outputs": {"choice": []}}, "one or more non-empty strings"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "one or more non-empty strings"),
        ({"structured_outputs": {"structural_tags": {"triggers": ["<"]}}}, "'structures'"),
        ({"structured_outputs": {"structural_tags": TAGS | {"triggers": []}}}, r"\['triggers'\]"),
        ({"structured_outputs": {"structural_tags": TAGS | {"structures": []}}}, r"\['structures'\]"),
        ({"structured_outputs": {"structural_tags": TAGS | {"triggers": ["<x"]}}}, "exactly one of the triggers"),
        ({"structured_outputs": {"regex": "a"}, "so_args": {"schema_type": "regex", "schema": "a"}}, "give one"),
        ({"so_args": "a"}, "expected a mapping"),
        ({"so_args": {"schema_type": "xml", "schema": "a"}}, "'xml': expected 'json', 'regex' or 'ebnf'"),
        ({"so_args": {"schema_type": "regex"}}, r"so_args\['schema'\] is missing"),
        ({"so_args": {"schema_type": "regex", "schema": "a", "serialized": 1}}, r"so_args\['serialized'\]: expected"),
        ({"so_args": {"schema_type": "regex", "schema": "a", "bound_token_ids": [1]}}, "'bound_token_ids'"),
        ({"so_args": {"schema_type": "regex", "schema": "a", "trigger_token_ids": [-1]}}, "token ids"),
        ({"so_args": {"schema_type": "regex", "schema": "a", "trigger_token_ids": "ab"}}, "token ids"),
        ({"so_args": {"schema_type": "regex", "schema": "a", "bound_token_id": 1}}, "give these too"),
        ({"so_args": {"schema_type": "regex", "schema": "a", "trigger_token_ids": [1], "bound_token_id": -1}}, "-1"),
    ],
)
def test_what_cannot_be_said_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        SamplingParams(**arguments)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
