"""Schemas whose documents are short: what is open-ended in them gets a bound, so that texts come to an end.

A model that draws at random adds digit to digit and letter to letter; without bounds most of its documents are cut off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer_structured_output.schema import LISTS_OF_SCHEMAS, MAPS_OF_SCHEMAS, SCHEMAS

MOST_CHARACTERS, MOST_OF_A_PATTERN, MOST_ITEMS, LARGEST = 8, 40, 2, 9999
_CLOSED_ALREADY = frozenset(["enum", "const", "$ref", "anyOf", "oneOf", "allOf"])
_SAYS_TYPE: Mapping[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "patternProperties", "additionalProperties", "propertyNames"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
}


def bounded(schema: Any, *, numbers: bool) -> Any:
    """The schema with types where it says none, and bounds for whatever has none.

    Args:
        numbers: whether numbers become whole ones of a few digits; fractions have no bound on their digits.
    """
    if schema is True:
        return {"type": ["boolean", "null"]}
    if not isinstance(schema, Mapping):
        return schema
    out: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in MAPS_OF_SCHEMAS:
            value = {name: bounded(one, numbers=numbers) for name, one in value.items()}
        elif keyword in LISTS_OF_SCHEMAS:
            value = [bounded(one, numbers=numbers) for one in value]
        elif keyword in SCHEMAS:
            value = bounded(value, numbers=numbers)
        out[keyword] = value
    if schema.keys() & _CLOSED_ALREADY:
        return out
    if "type" not in schema:
        said = [kind for kind, keywords in _SAYS_TYPE.items() if keywords & schema.keys()]
        out["type"] = said[0] if said else ["boolean", "null", "string"]
    if numbers and out["type"] == "number":
        out["type"] = "integer"
    kinds = {out["type"]} if isinstance(out["type"], str) else set(out["type"])
    if "string" in kinds and "format" not in schema:
        most = MOST_OF_A_PATTERN if "pattern" in schema else MOST_CHARACTERS
        out["maxLength"] = max(min(schema.get("maxLength", most), most), schema.get("minLength", 0))
    if "array" in kinds:
        least = max(MOST_ITEMS, schema.get("minItems", 0), len(schema.get("prefixItems", ())))
        out["maxItems"] = min(schema.get("maxItems", least), least)
    if kinds & {"integer", "number"} and not schema.keys() & {"multipleOf", "minimum", "exclusiveMinimum"}:
        out["minimum"] = min(0, schema.get("maximum", 0) - LARGEST, schema.get("exclusiveMaximum", 0) - LARGEST)
    if kinds & {"integer", "number"} and not schema.keys() & {"multipleOf", "maximum", "exclusiveMaximum"}:
        out["maximum"] = max(LARGEST, schema.get("minimum", 0) + LARGEST, schema.get("exclusiveMinimum", 0) + LARGEST)
    if "object" in kinds and "properties" in schema and not schema.keys() & {"patternProperties", "minProperties"}:
        if set(schema.get("required", ())) <= schema["properties"].keys():
            out["additionalProperties"] = False
    elif "object" in kinds and not schema.keys() & {"patternProperties", "minProperties", "required"}:
        out["maxProperties"] = min(schema.get("maxProperties", MOST_ITEMS), MOST_ITEMS)
    return out
