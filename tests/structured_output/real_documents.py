"""Documents of a JSON Schema, made at random in the order in which they are written, and changed at random.

Whether a document is valid is not decided here: the tests ask an independent validator about each.
"""

from __future__ import annotations

import copy
import random
import re
from functools import cache
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

MOST_DEPTH = 12
FORMATS = {
    "date": ["2026-11-29", "2024-02-29"],
    "date-time": ["2026-11-29T12:00:00Z", "1999-01-31T23:59:59.5+01:00"],
    "time": ["12:00:00Z"],
    "email": ["a.b@example.com"],
    "hostname": ["a-b.example.com"],
    "ipv4": ["192.168.0.1"],
    "ipv6": ["2001:db8::1"],
    "uri": ["https://example.com/a?b=c#d", "urn:a:b"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
}
SCALARS: list[Any] = ["", "text", 'a "quoted" \\ 漢字', 0, -7, 2.5, True, False, None]
KINDS = ("null", "boolean", "integer", "number", "string", "array", "object")


class Unmade(Exception):
    """The maker knows no document of this schema."""


def document(schema: Any, source: random.Random) -> Any:
    """A document that the schema probably accepts.

    Raises:
        Unmade: it combines schemas in a way that is not followed here.
    """
    return _Maker(schema, source).make(schema, 0)


class _Maker:
    def __init__(self, root: Any, source: random.Random) -> None:
        self._root = root
        self._source = source

    def make(self, schema: Any, depth: int) -> Any:
        source = self._source
        if depth > MOST_DEPTH or schema is False:
            raise Unmade
        if schema is True or schema == {}:
            return source.choice(SCALARS)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return source.choice(schema["enum"])
        if "$ref" in schema:
            return self.make(self._target(schema["$ref"]), depth + 1)
        for keyword in ("allOf", "anyOf", "oneOf"):
            if keyword in schema:
                return self._combined(schema, keyword, depth)
        kinds = schema.get("type", KINDS if not schema.keys() & {"properties", "required"} else "object")
        kind = kinds if isinstance(kinds, str) else source.choice(list(kinds))
        return getattr(self, f"_{kind}")(schema, depth)

    def _target(self, reference: str) -> Any:
        node = self._root
        for part in reference.removeprefix("#").split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(node, dict) or key not in node:
                raise Unmade
            node = node[key]
        return node

    def _combined(self, schema: Any, keyword: str, depth: int) -> Any:
        """One branch (of ``allOf``: the only one), where the rest adds at most what is required or a type."""
        rest = {k: v for k, v in schema.items() if k not in (keyword, "$defs", "definitions", "type", "discriminator")}
        branches = schema[keyword]
        if rest and all(isinstance(one, dict) and one.keys() <= {"required"} for one in branches):
            chosen = self._source.choice(branches)
            required = [*rest.get("required", ()), *chosen.get("required", ())]
            return self.make({**rest, "type": schema.get("type", "object"), "required": required}, depth + 1)
        if rest or (keyword == "allOf" and len(branches) > 1):
            raise Unmade
        return self.make(self._source.choice(branches), depth + 1)

    def _null(self, schema: Any, depth: int) -> None:
        return None

    def _boolean(self, schema: Any, depth: int) -> bool:
        return self._source.random() < 0.5

    def _integer(self, schema: Any, depth: int) -> int:
        step = int(schema.get("multipleOf", 1))
        low = max(schema.get("minimum", -100), schema.get("exclusiveMinimum", -101) + 1)
        high = min(schema.get("maximum", low + 10**6), schema.get("exclusiveMaximum", low + 10**6) - 1)
        low = max(low, high - 10**9) if "minimum" not in schema else low
        return self._source.randint(-(-int(low) // step), int(high) // step) * step

    def _number(self, schema: Any, depth: int) -> float:
        if "multipleOf" in schema or self._source.random() < 0.5:
            return self._integer({**schema, "multipleOf": max(1, schema.get("multipleOf", 1))}, depth)
        low, high = schema.get("minimum", 0), schema.get("maximum", schema.get("minimum", 0) + 1000)
        return round(self._source.uniform(low, high), 3)

    def _string(self, schema: Any, depth: int) -> str:
        if schema.get("format") in FORMATS:
            return self._source.choice(FORMATS[schema["format"]])
        low = int(schema.get("minLength", 0))
        high = int(schema.get("maxLength", low + 12))
        if "pattern" in schema:
            fitting = [text for text in texts_of(schema["pattern"], low) if low <= len(text) <= high]
            if not fitting:
                raise Unmade
            return self._source.choice(fitting)
        count = self._source.randint(low, min(high, low + 12))
        return "".join(self._source.choice('abcXYZ 019-_./:é漢😀"\\\n') for _ in range(count))

    def _array(self, schema: Any, depth: int) -> list[Any]:
        first = schema.get("prefixItems", [])
        low = int(schema.get("minItems", 0))
        high = min(int(schema.get("maxItems", low + 2)), low + 2)
        if schema.get("items", True) is False:
            high = min(high, len(first))
        count = low if depth > 5 else self._source.randint(low, max(low, high))
        return [self.make(first[i] if i < len(first) else schema.get("items", True), depth + 1) for i in range(count)]

    def _object(self, schema: Any, depth: int) -> dict[str, Any]:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        made = {}
        for name, one in properties.items():
            if name in required or (depth < 5 and one is not False and self._source.random() < 0.5):
                try:
                    made[name] = self.make(one, depth + 1)
                except Unmade:
                    if name in required:
                        raise
        others = [name for name in required if name not in properties]
        others += ["another key", "k2"][: max(0, int(schema.get("minProperties", 0)) - len(made) - len(others))]
        if others and "patternProperties" in schema:
            raise Unmade
        for name in others:
            made[name] = self.make(schema.get("additionalProperties", True), depth + 1)
        for pattern, one in schema.get("patternProperties", {}).items():
            if self._source.random() < 0.5 and (names := [text for text in texts_of(pattern, 1) if text not in made]):
                made[self._source.choice(names)] = self.make(one, depth + 1)
        return made


@cache
def texts_of(pattern: str, least: int) -> tuple[str, ...]:
    """A few texts in which Python finds a pattern, the same each time; none if it cannot read it."""
    found: list[str] = []
    try:
        re.compile(pattern)
    except re.error:
        return ()
    strategy = st.from_regex(pattern).filter(lambda text: len(text) >= least and not text.endswith("\n"))
    plain = settings(
        max_examples=25,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    try:
        plain(given(strategy)(found.append))()
    except Exception:  # too few texts are long enough
        return tuple(dict.fromkeys(found))
    return tuple(dict.fromkeys(found))


def changed(value: Any, source: random.Random) -> Any:
    """A copy with one thing changed somewhere."""
    value = copy.deepcopy(value)
    holders = [[value]]
    for holder in holders:
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            if isinstance(holder[key], dict | list):
                holders.append(holder[key])
    holder = source.choice([one for one in holders if one] or holders)
    key = source.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    match source.randrange(5):
        case 0 if holder is not holders[0]:
            del holder[key]
        case 1 if isinstance(holder[key], str):
            holder[key] = holder[key] + source.choice(["x", " ", "é", "0" * 300])
        case 2 if isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] = source.choice([holder[key] + 10**7, -holder[key] - 1, holder[key] + 0.5])
        case 3 if isinstance(holder[key], dict):
            holder[key]["unheard of"] = source.choice(SCALARS)
        case _:
            holder[key] = source.choice([*SCALARS, [], {}, [1], {"a": 1}])
    return holders[0][0]
