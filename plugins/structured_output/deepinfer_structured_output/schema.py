"""JSON Schemas before they are compiled: which keywords they use, and what no library has to see."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deepinfer_core.api import ConstraintSpec, InvalidRequestError

SINGLE_SPACES = (", ", ": ")
MAX_DEPTH = 64
"""How deep schemas may be nested in each other; libraries walk them by recursion."""

ANNOTATIONS = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "$schema",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "discriminator",
    ]
)
"""Keywords that say nothing about which documents are valid (JSON Schema 2020-12, core and validation, section 9)."""

MAPS_OF_SCHEMAS = frozenset(["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"])
LISTS_OF_SCHEMAS = frozenset(["prefixItems", "allOf", "anyOf", "oneOf"])
SCHEMAS = frozenset(
    [
        "items",
        "additionalProperties",
        "propertyNames",
        "contains",
        "not",
        "if",
        "then",
        "else",
        "unevaluatedItems",
        "unevaluatedProperties",
        "additionalItems",
    ]
)
DATA = frozenset(["const", "enum", "required", "dependentRequired", "type"])
BOUNDS = frozenset(
    [
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
        "minProperties",
        "maxProperties",
        "minContains",
        "maxContains",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "pattern",
        "format",
        "uniqueItems",
    ]
)
REFERENCES = frozenset(["$ref", "$dynamicRef", "$anchor", "$dynamicAnchor", "$id", "$vocabulary"])
KEYWORDS = MAPS_OF_SCHEMAS | LISTS_OF_SCHEMAS | SCHEMAS | DATA | BOUNDS | REFERENCES | {"dependencies"}

_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = (
    "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"  # 0000 is none: (0[48]|...)00
)
_DATE = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
EXACT_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""Formats as patterns (RFC 3339, with the calendar's leap days, and without leap seconds, which only some minutes
of history have): libraries take the 29th of February of every year, or the 60th second of every minute."""


def subschemas(schema: Any) -> Iterator[Mapping[str, Any] | bool]:
    """A schema and all schemas in it, those under ``$defs`` included."""
    pending: list[tuple[Any, int]] = [(schema, 0)]
    while pending:
        found, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise InvalidRequestError(f"structured_outputs: the schema nests deeper than {MAX_DEPTH} schemas")
        if isinstance(found, Mapping):
            pending.extend((child, depth + 1) for child in _children(found))
        elif not isinstance(found, bool):
            raise InvalidRequestError(f"structured_outputs: {_shown(found)}: expected a schema: an object or a boolean")
        yield found


def _children(schema: Mapping[str, Any]) -> Iterator[Any]:
    for keyword, value in schema.items():
        if keyword in MAPS_OF_SCHEMAS:
            if not isinstance(value, Mapping):
                raise InvalidRequestError(f"structured_outputs: {keyword}={_shown(value)}: expected an object")
            yield from value.values()
        elif keyword in LISTS_OF_SCHEMAS:
            if not isinstance(value, Sequence) or isinstance(value, str):
                raise InvalidRequestError(f"structured_outputs: {keyword}={_shown(value)}: expected a list of schemas")
            yield from value
        elif keyword in SCHEMAS:
            yield value


def says_nothing(keyword: str, schema: Mapping[str, Any]) -> bool:
    """Whether a keyword of a schema leaves out no document."""
    if keyword == "uniqueItems":
        most = schema.get("maxItems")
        return schema[keyword] is False or (isinstance(most, int | float) and most <= 1)
    return keyword in ANNOTATIONS or keyword.startswith("x-")


def features(schema: Any) -> dict[str, None]:
    """What a library must enforce, in order of appearance: keywords, and ``format: name`` for each format."""
    found: dict[str, None] = {}
    for one in subschemas(_without_address(schema)):
        if isinstance(one, bool):
            if not one:
                found["false"] = None
            continue
        for keyword, value in one.items():
            if says_nothing(keyword, one):
                continue
            if keyword == "format":
                found[f"format: {value}"] = None
            elif keyword in ("$ref", "$dynamicRef") and not str(value).startswith("#"):
                found[f"{keyword} to another document"] = None
            else:
                found[keyword] = None
    return found


def _without_address(schema: Any) -> Any:
    """A whole document's own ``$id`` matters to references from elsewhere, and there are none."""
    if isinstance(schema, Mapping) and "$id" in schema:
        return {keyword: value for keyword, value in schema.items() if keyword != "$id"}
    return schema


def is_plain(schema: Any) -> bool:
    """Every schema says its type, and no two of its keywords have to be combined: what every library can do that
    knows the keywords one by one."""
    return all(isinstance(one, bool) or _is_plain(one) for one in subschemas(schema))


_ONE_AT_A_TIME = frozenset(
    ["pattern", "format", "enum", "const", "$ref", "anyOf", "oneOf", "allOf", "patternProperties"]
)
_LOCAL = re.compile(r"#(/[^%]*)?")
_UNLIKE_IN_UNICODE = re.compile(r"\\[DWSs]")


def _is_plain(schema: Mapping[str, Any]) -> bool:
    said = {k for k in schema if k in KEYWORDS and k not in ("$defs", "definitions", "type")}
    alone = said & _ONE_AT_A_TIME
    if "allOf" in said or (alone and (len(alone) > 1 or said - alone - {"additionalProperties"})):
        return False
    names = schema.get("properties", {})
    return (
        (isinstance(schema.get("type"), str) or bool(alone - {"pattern", "format", "patternProperties"}))
        and set(schema.get("required", ())) <= set(names)
        and all(name.isprintable() and not set(name) & set('"\\') for name in names)
        and _LOCAL.fullmatch(str(schema.get("$ref", "#"))) is not None
        and not _UNLIKE_IN_UNICODE.search(str(schema.get("pattern", "")))
    )


def simplified(schema: Any) -> Any:
    """The same schema without annotations, and with the formats of :data:`EXACT_FORMATS` as patterns.

    Raises:
        InvalidRequestError: such a format stands beside a ``pattern``.
    """
    return _simplified(_without_address(schema))


def _simplified(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    out: dict[str, Any] = {}
    for keyword, value in schema.items():
        if says_nothing(keyword, schema):
            continue
        if keyword in MAPS_OF_SCHEMAS:
            value = {name: _simplified(one) for name, one in value.items()}
        elif keyword in LISTS_OF_SCHEMAS:
            value = [_simplified(one) for one in value]
        elif keyword in SCHEMAS:
            value = _simplified(value)
        elif keyword == "format" and value in EXACT_FORMATS:
            if "pattern" in schema:
                raise InvalidRequestError(f"structured_outputs: format {value!r} beside pattern cannot be enforced")
            keyword, value = "pattern", EXACT_FORMATS[value]
        out[keyword] = value
    return out


def tags_of(spec: ConstraintSpec) -> list[tuple[str, list[dict[str, Any]]]]:
    """Each trigger of structural tags with the tags that begin with it."""
    tags = json.loads(spec.text)
    groups = [
        (trigger, [t for t in tags["structures"] if t["begin"].startswith(trigger)]) for trigger in tags["triggers"]
    ]
    return [(trigger, group) for trigger, group in groups if group]


def alternatives(texts: Sequence[str]) -> str:
    """A regular expression for one of some texts, every character but letters and digits by its number."""
    return "|".join("".join(c if c.isalnum() and c.isascii() else f"\\x{{{ord(c):x}}}" for c in text) for text in texts)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:80] + "..."
