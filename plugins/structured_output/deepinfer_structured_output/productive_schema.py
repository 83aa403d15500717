"""Parts of a JSON Schema that no finite document satisfies, because each needs a smaller one of itself.

What decides it is a least fixpoint, as for rules of a grammar: a schema is *productive* when a finite document might
satisfy it, given those already known to be. Only recursion is looked at, and keywords are taken one by one, so that
"productive" may be wrong and "unproductive" never is. An unproductive part is replaced by ``false``, which means the
same and leads no text into it; a whole schema that is unproductive is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from deepinfer_core.api import InvalidRequestError

from .schema import LISTS_OF_SCHEMAS, MAPS_OF_SCHEMAS, SCHEMAS

_CONTAINERS = {"object", "array"}
_DEFINITIONS = ("$defs", "definitions")
_DEFINITION = re.compile(r"#|#[^/].*|#/(\$defs|definitions)/[^/]+")


def check_productive(schema: Any) -> None:
    """Refuse a schema that no finite document satisfies.

    Raises:
        InvalidRequestError: names what needs itself, as JSON pointers.
    """
    known = _Productive(schema)
    if not known.of(schema):
        raise InvalidRequestError(
            f"structured_outputs: JSON Schema {' needs '.join(known.circle())} again: no finite document satisfies it; "
            "make a property of the circle optional, or let it be null or an empty array"
        )


def without_unproductive(schema: Any) -> Any:
    """The schema with ``false`` in place of every part that no finite document satisfies."""
    known = _Productive(schema)
    return _pruned(schema, known) if known.unproductive and known.refers_to_definitions else schema


class _Productive:
    """Which subschemas of a document are productive. ``unproductive``: how many are not;
    ``refers_to_definitions``: no reference leads through a part that might be replaced.
    """

    def __init__(self, document: Any) -> None:
        self._document = document
        self._nodes = dict(_walk(document, "#"))
        self._by_id = {id(node): pointer for pointer, node in self._nodes.items()}
        # A resource of its own within the document has pointers of its own: they are not followed.
        self._one_resource = not any("$id" in node for place, node in self._nodes.items() if place != "#")
        anchors = {node["$anchor"]: node for node in self._nodes.values() if isinstance(node.get("$anchor"), str)}
        self._anchors: Mapping[str, Any] = anchors
        addresses = [str(node["$ref"]) for node in self._nodes.values() if "$ref" in node]
        self.refers_to_definitions = all(_DEFINITION.fullmatch(address) for address in addresses)
        self._found: set[int] = set()
        while more := {id(n) for n in self._nodes.values() if id(n) not in self._found and self._ends(n)}:
            self._found |= more
        self.unproductive = len(self._by_id.keys() - self._found)

    def of(self, schema: Any) -> bool:
        return not isinstance(schema, Mapping) or id(schema) in self._found or id(schema) not in self._by_id

    def circle(self) -> list[str]:
        """Pointers from the document to the first part that is met again, each needing the next."""
        path: list[str] = []
        node = self._document
        while (pointer := self._by_id[id(node)]) not in path:
            path.append(pointer)
            node = next(one for group in self._needs(node) if not any(map(self.of, group)) for one in group)
        return [*map(repr, path[path.index(pointer) :]), repr(pointer)]

    def _ends(self, schema: Mapping[str, Any]) -> bool:
        return all(any(map(self.of, group)) for group in self._needs(schema))

    def _needs(self, schema: Mapping[str, Any]) -> Iterator[list[Any]]:
        """Groups of schemas, of each of which one must be productive."""
        if "$ref" in schema:
            yield [self._target(schema["$ref"])]
        for part in schema.get("allOf", ()):
            yield [part]
        for keyword in ("anyOf", "oneOf"):
            if schema.get(keyword):
                yield list(schema[keyword])
        types = schema.get("type")
        if isinstance(types, list) and len(types) == 1:
            (types,) = types
        if isinstance(types, str) and types in _CONTAINERS:
            yield from _members(schema, types)

    def _target(self, reference: Any) -> Any:
        """What a reference within the document is to; True, which is productive, for any other."""
        address = unquote(str(reference))
        if not address.startswith("#") or not self._one_resource:
            return True
        if address[1:2] != "/":
            return self._document if address == "#" else self._anchors.get(address[1:], True)
        node = self._document
        for part in address[2:].split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, Mapping) and key in node:
                node = node[key]
            elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
                node = node[int(key)]
            else:
                return True
        return node


def _members(schema: Mapping[str, Any], kind: str) -> Iterator[list[Any]]:
    """What every object, or every array, of a schema must hold."""
    if kind == "object":
        properties = schema.get("properties", {})
        for name in schema.get("required", ()):
            if isinstance(properties, Mapping) and name in properties:
                yield [properties[name]]
            elif "patternProperties" not in schema:
                yield [schema.get("additionalProperties", True)]
        return
    least = schema.get("minItems", 0)
    first = schema.get("prefixItems", [])
    if isinstance(least, int | float) and isinstance(first, list):
        yield from ([one] for one in first[: int(least)])
        if least > len(first):
            yield [schema.get("items", True)]


def _walk(schema: Any, pointer: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A schema and all in it, by JSON pointer."""
    pending = [(schema, pointer)]
    while pending:
        node, place = pending.pop()
        if not isinstance(node, Mapping):
            continue
        yield place, node
        for keyword, value in node.items():
            for key, child in _children(keyword, value):
                pending.append((child, f"{place}/{keyword}{key}"))


def _children(keyword: str, value: Any) -> Iterator[tuple[str, Any]]:
    if keyword in MAPS_OF_SCHEMAS and isinstance(value, Mapping):
        yield from ((f"/{_escaped(name)}", one) for name, one in value.items())
    elif keyword in LISTS_OF_SCHEMAS and isinstance(value, list):
        yield from ((f"/{index}", one) for index, one in enumerate(value))
    elif keyword in SCHEMAS:
        yield "", value


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _pruned(schema: Any, known: _Productive) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    if not known.of(schema):
        return False
    out: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _DEFINITIONS and isinstance(value, Mapping):  # nobody refers to an unproductive one any more
            value = {name: _pruned(one, known) for name, one in value.items() if known.of(one)}
        elif keyword in MAPS_OF_SCHEMAS and isinstance(value, Mapping):
            value = {name: _pruned(one, known) for name, one in value.items()}
        elif keyword in LISTS_OF_SCHEMAS and isinstance(value, list):
            value = [_pruned(one, known) for one in value]
        elif keyword in SCHEMAS:
            value = _pruned(value, known)
        out[keyword] = value
    return out
