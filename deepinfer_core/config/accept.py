"""Which values a type takes. Strict: no number for a flag, no flag for a number, no NaN, no string for a number.

The one exception is :class:`Text`, what an environment variable or ``--set`` gives: it is read according to the type
that is wanted.
"""

from __future__ import annotations

import math
import tomllib
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class Text(str):
    """A value that was typed as text and whose type is decided by the setting."""

    __slots__ = ()


class NotAccepted(Exception):
    """The value is not of the type. The caller knows the setting and words the error.

    Attributes:
        key: inside a table, the key whose value was refused; else empty.
        value, expected: of that key.
    """

    def __init__(self, key: str = "", value: object = None, expected: str = "") -> None:
        super().__init__(key)
        self.key = key
        self.value = value
        self.expected = expected


def handles(annotation: Any) -> bool:
    """True for the types that :func:`accept` knows."""
    origin = get_origin(annotation)
    return annotation in (bool, int, float, str, object, Any) or origin in (
        Literal,
        Union,
        types.UnionType,
        tuple,
        Mapping,
    )


def accept(value: Any, annotation: Any) -> Any:
    """``value`` as an instance of ``annotation``. ``object`` leaves it as it is, ``Any`` reads text as TOML.

    Raises:
        NotAccepted: it is none.
    """
    origin = get_origin(annotation)
    if annotation is object:
        return value
    if annotation is Any:
        return literal(value) if isinstance(value, Text) else value
    if origin is Literal:
        return _literal_option(value, get_args(annotation))
    if origin in (Union, types.UnionType):
        return _first_accepted(value, get_args(annotation))
    if origin is tuple:
        return _list(value, get_args(annotation)[0])
    if origin is Mapping:
        return _table(value, get_args(annotation)[1])
    return _PRIMITIVES[annotation](value)


def describe_type(annotation: Any) -> str:
    """The type in words, as they follow "expected"."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(repr(option) for option in arguments)
    if origin in (Union, types.UnionType):
        ordered = [part for part in arguments if part is not type(None)]
        words = [describe_type(part) for part in ordered]
        return " or ".join([*words, *(["none"] if len(ordered) < len(arguments) else [])])
    if origin is tuple:
        return f"a list of {_PLURALS.get(arguments[0], describe_type(arguments[0]))}"
    if origin is Mapping:
        return f"a table of {describe_type(arguments[1])}"
    return _WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)))


def literal(text: str) -> Any:
    """``text`` read as a TOML value, or itself when it is none."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return str(text)
    return parsed["value"] if len(parsed) == 1 else str(text)


def _literal_option(value: Any, options: tuple[Any, ...]) -> Any:
    plain = _string(value) if isinstance(value, Text) else value
    for option in options:
        if type(option) is type(plain) and option == plain:
            return option
    raise NotAccepted


def _first_accepted(value: Any, alternatives: tuple[Any, ...]) -> Any:
    if type(None) in alternatives:
        # An empty list is a value of its own, so a list is never written as "none".
        lists = any(get_origin(part) is tuple for part in alternatives)
        if value is None or (isinstance(value, Text) and value.lower() == "none" and not lists):
            return None
    for part in alternatives:
        try:
            if part is not type(None):
                return accept(value, part)
        except NotAccepted:
            continue
    raise NotAccepted


def _list(value: Any, item: Any) -> tuple[Any, ...]:
    if isinstance(value, Text):
        parsed = literal(value)
        if isinstance(parsed, list):
            value = parsed
        else:
            value = [Text(part.strip()) for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        raise NotAccepted
    return tuple(accept(part, item) for part in value)


def _table(value: Any, item: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise NotAccepted
    accepted = {}
    for key, part in value.items():
        try:
            accepted[key] = accept(part, item)
        except NotAccepted:
            raise NotAccepted(key, part, describe_type(item)) from None
    return accepted


def _bool(value: Any) -> bool:
    if isinstance(value, Text) and value.strip().lower() in _FLAGS:
        return _FLAGS[value.strip().lower()]
    if isinstance(value, bool):
        return value
    raise NotAccepted


def _int(value: Any) -> int:
    value = literal(value) if isinstance(value, Text) else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise NotAccepted
    return value


def _float(value: Any) -> float:
    value = literal(value) if isinstance(value, Text) else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise NotAccepted
    return float(value)


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise NotAccepted
    if isinstance(value, Text):
        quoted = literal(value)
        return quoted if isinstance(quoted, str) else str(value)
    return value


_PRIMITIVES: dict[type, Callable[[Any], Any]] = {bool: _bool, int: _int, float: _float, str: _string}
_WORDS = {bool: "true or false", int: "an integer", float: "a finite number", str: "a string", Any: "any value"}
_PLURALS = {int: "integers", float: "finite numbers", str: "strings"}
