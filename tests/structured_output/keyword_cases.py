"""Schemas like those people write, with documents that are and are not valid: one case for each thing a schema can say.

Names are the features a case is about, joined by `` + ``; text in brackets tells cases apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}

CASES: Mapping[str, tuple[Any, list[Any], list[Any]]] = {
    "pattern": ({"type": "string", "pattern": "^[A-Z]{2}[0-9]+$"}, ["AB12"], ["ab12", "AB", "xAB12"]),
    "pattern ": ({"type": "string", "pattern": "[0-9]"}, ["a1b", "1"], ["abc", ""]),
    "pattern + minLength": (
        {"type": "string", "minLength": 3, "pattern": "^[0-9]*$"},
        ["123", "1234"],
        ["12", "", "abc"],
    ),
    "pattern + maxLength": ({"type": "string", "pattern": "^[xy]+$", "maxLength": 2}, ["xy", "x"], ["xyx", ""]),
    "minLength + maxLength": (
        {"type": "string", "minLength": 2, "maxLength": 3},
        ["ab", "漢字", "😀😀"],
        ["a", "abcd"],
    ),
    "minItems + maxItems": (
        {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
        [[1, 2], [1, 2, 3]],
        [[1], [1, 2, 3, 4]],
    ),
    "uniqueItems": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [[1, 2]], [[1, 1]]),
    "prefixItems + items": (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
        [[1, "a"]],
        [["a", 1], [1, "a", 2]],
    ),
    "contains": ({"type": "array", "contains": {"const": 7}}, [[1, 7]], [[1, 2]]),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [True, None]),
    "oneOf ": (
        {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 10}, {"type": "integer", "minimum": 5, "maximum": 20}]},
        [3, 15],
        [7],
    ),
    "anyOf": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, [1, None], ["a"]),
    "allOf": (
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"properties": {"b": {"type": "string"}}, "required": ["b"]},
            ]
        },
        [{"a": 1, "b": "x"}],
        [{"a": 1}, {"a": "x", "b": "y"}],
    ),
    "not": ({"type": "string", "not": {"const": "x"}}, ["y"], ["x"]),
    "if + then + else": (
        {
            "type": "object",
            "properties": {"k": {"enum": ["a", "b"]}, "v": {}},
            "required": ["k", "v"],
            "if": {"properties": {"k": {"const": "a"}}},
            "then": {"properties": {"v": {"type": "integer"}}},
            "else": {"properties": {"v": {"type": "string"}}},
        },
        [{"k": "a", "v": 1}],
        [{"k": "a", "v": "s"}],
    ),
    "$ref + $defs": (
        {"$ref": "#/$defs/node", "$defs": {"node": _NODE}},
        [{"v": 1, "next": {"v": 2, "next": None}}],
        [{"v": 1, "next": {"v": 2}}, {"v": 1}],
    ),
    "definitions": ({"$ref": "#/definitions/a", "definitions": {"a": {"type": "integer"}}}, [1], ["x"]),
    "$ref": (
        {
            "type": "object",
            "properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            "required": ["n"],
            "additionalProperties": False,
        },
        [{"n": {"n": None}}],
        [{"n": 1}],
    ),
    "properties + required": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        [{"a": 1, "b": 2}],
        [{"a": 1}, {}, {"a": "x", "b": 2}],
    ),
    "properties": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        [{"a": 1}, {"a": 1, "z": "q"}],
        [{}, {"a": "q"}, {"z": 1}],
    ),
    "additionalProperties": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
        [{"a": 1}, {}],
        [{"b": 1}],
    ),
    "additionalProperties ": (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        [{"x": 1, "y": 2}, {}],
        [{"x": "s"}],
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": False},
        [{"x_a": 1}],
        [{"x_a": "s"}, {"y": 1}],
    ),
    "propertyNames": (
        {
            "type": "object",
            "propertyNames": {"type": "string", "pattern": "^[a-z]+$"},
            "additionalProperties": {"type": "integer"},
        },
        [{"ab": 1}, {}],
        [{"AB": 1}, {"ab": "x"}],
    ),
    "minProperties + maxProperties": (
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2},
        [{"a": 1}, {"a": 1, "b": 2}],
        [{}, {"a": 1, "b": 2, "c": 3}],
    ),
    "dependentRequired": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "dependentRequired": {"a": ["b"]},
            "additionalProperties": False,
        },
        [{"a": 1, "b": 2}, {"b": 1}],
        [{"a": 1}],
    ),
    "minimum + maximum": ({"type": "integer", "minimum": 5, "maximum": 120}, [5, 77, 120], [4, 121, -1]),
    "exclusiveMinimum + maximum": (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1.5},
        [0.5, 1.5, 1],
        [0, -1, 2, 1.51],
    ),
    "exclusiveMaximum + minimum": (
        {"type": "integer", "exclusiveMaximum": 10, "minimum": -3},
        [9, -3, 0],
        [10, -4],
    ),
    "multipleOf": ({"type": "integer", "multipleOf": 5}, [10, 0, -5], [7]),
    "const": ({"const": {"a": [1, "x"]}}, [{"a": [1, "x"]}], [{"a": [2, "x"]}, {}]),
    "enum": (
        {"enum": ["naïve", "漢字", "😀", 'a"b\\c', 1, None, True, [1]]},
        ["漢字", "😀", 'a"b\\c', 1, None, [1]],
        ["x", 2, False],
    ),
    "type": ({"type": ["string", "null"]}, ["a", None], [1]),
    "false": (
        {"type": "object", "properties": {"a": False, "b": {"type": "integer"}}, "additionalProperties": False},
        [{"b": 1}],
        [{"a": 1}],
    ),
    "unevaluatedProperties": (
        {
            "type": "object",
            "allOf": [{"properties": {"a": {"type": "integer"}}}],
            "unevaluatedProperties": False,
        },
        [{"a": 1}],
        [{"z": 1}],
    ),
    "maxLength": ({"type": "string", "maxLength": 500}, ["abc", ""], ["x" * 501]),
    "minItems": ({"type": "array", "items": {"type": "integer"}, "minItems": 40}, [list(range(40))], [[1]]),
}
