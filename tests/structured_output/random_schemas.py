"""Schemas as applications write them, made at random, with documents that they accept."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

WORDS = ("id", "name", "tags", "city", "zip code", "größe", "is_active", "n", "price", "漢字", "kind", "note's")

Made = tuple[Any, Callable[[random.Random], Any]]


def random_schema(source: random.Random, depth: int = 3) -> Made:
    """A schema, and a function that makes a document of it (properties in the schema's order)."""
    kinds = [_string, _integer, _number, _constant, _boolean]
    if depth > 0:
        kinds += [_object, _object, _array, _choice]
    return source.choice(kinds)(source, depth)


def _string(source: random.Random, depth: int) -> Made:
    low, high = sorted((source.randrange(4), source.randrange(1, 9)))
    match source.randrange(4):
        case 0:
            return {"type": "string", "minLength": low, "maxLength": high}, lambda r: _text(r, r.randint(low, high))
        case 1:
            return {"type": "string", "maxLength": 12}, lambda r: _text(r, r.randint(0, 12))
        case 2:
            digits = f"^[A-Z]{{{low},{high}}}-[0-9]+$"
            return {
                "type": "string",
                "pattern": digits,
                "maxLength": 40,
            }, lambda r: "".join(r.choice("ABXYZ") for _ in range(r.randint(low, high))) + f"-{r.randrange(9999)}"
        case _:
            return {
                "type": "string",
                "format": "date",
            }, lambda r: f"{r.randint(1, 9999):04}-{r.randint(1, 12):02}-{r.randint(1, 28):02}"


def _text(source: random.Random, length: int) -> str:
    return "".join(source.choice('abc XYZ019é漢😀/"\\\n') for _ in range(length))


def _integer(source: random.Random, depth: int) -> Made:
    low = source.randint(-50, 50)
    high = low + source.randrange(200)
    if source.random() < 0.5:
        return {"type": "integer", "minimum": low, "maximum": high}, lambda r: r.randint(low, high)
    return {"type": "integer", "exclusiveMinimum": low, "maximum": high + 1}, lambda r: r.randint(low + 1, high + 1)


def _number(source: random.Random, depth: int) -> Made:
    high = source.randint(1, 1000)
    return {"type": "number", "minimum": 0, "maximum": high}, lambda r: round(r.uniform(0, high), 2)


def _boolean(source: random.Random, depth: int) -> Made:
    return {"type": source.choice(["boolean", ["boolean", "null"]])}, lambda r: r.random() < 0.5


def _constant(source: random.Random, depth: int) -> Made:
    values = source.sample(["red", "grün", 'a"b', 7, None, True, [1, "x"], {"k": 2.5}], k=source.randint(1, 4))
    if len(values) == 1:
        return {"const": values[0]}, lambda r: values[0]
    return {"enum": values}, lambda r: r.choice(values)


def _array(source: random.Random, depth: int) -> Made:
    item, make = random_schema(source, depth - 1)
    low = source.randrange(3)
    high = low + source.randrange(1, 4)
    schema = {"type": "array", "items": item, "minItems": low, "maxItems": high}
    return schema, lambda r: [make(r) for _ in range(r.randint(low, high))]


def _choice(source: random.Random, depth: int) -> Made:
    first, second = random_schema(source, depth - 1), random_schema(source, depth - 1)
    return {"anyOf": [first[0], second[0]]}, lambda r: r.choice((first, second))[1](r)


def _object(source: random.Random, depth: int) -> Made:
    names = source.sample(WORDS, k=source.randint(1, 4))
    parts = {name: random_schema(source, depth - 1) for name in names}
    required = [name for name in names if source.random() < 0.6]
    schema = {
        "type": "object",
        "properties": {name: part[0] for name, part in parts.items()},
        "required": required,
        "additionalProperties": False,
    }
    if source.random() < 0.3:
        schema = {"$ref": "#/$defs/x", "$defs": {"x": schema}} if depth == 3 else schema
    return schema, lambda r: {n: parts[n][1](r) for n in names if n in required or r.random() < 0.5}
