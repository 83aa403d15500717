"""From plain tables to the attrs tree, by cattrs, with errors that say which setting and who gave its value."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

import attrs
import cattrs
from cattrs.errors import ClassValidationError, ForbiddenExtraKeysError

from deepinfer_core.api import ConfigError

from .accept import NotAccepted, Text, accept, describe_type, handles
from .field import OutOfRange
from .settings import nearest

T = TypeVar("T")

_VALIDATOR_TEXT = re.compile(r"'(?P<field>\w+)' (?P<what>must .*?)(: [^:]*| \([^()]*\)\.?)?")
"""What validators of attrs say of a field of a plugin's class: ``'port' must be >= 0: -1``."""


@cache
def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_structure_hook_func(handles, accept)
    # cattrs looks up exact types first, so its own lenient hooks for these must be replaced one by one.
    for primitive in (bool, int, float, str):
        converter.register_structure_hook(primitive, accept)
    return converter


def structure(
    values: Mapping[str, Any],
    group: type[T],
    *,
    prefix: str = "",
    source_of: Callable[[str], str],
    expected_of: Callable[[str], str] = lambda _: "",
) -> T:
    """An instance of ``group`` with ``values``.

    Args:
        values: nested tables, keys as the group's fields.
        prefix: dotted path of the group, for errors.
        source_of: dotted path -> where the value came from.
        expected_of: dotted path -> legal values in words; the type's own words when empty.

    Raises:
        ConfigError: unknown key, wrong type or out of range; names path, value, expectation and source.
    """
    try:
        return _converter().structure(values, group)
    except ClassValidationError as error:
        path, problem, annotation = _first_problem(error, prefix)
        if isinstance(problem, ForbiddenExtraKeysError):
            raise _unknown_key(problem, path, source_of) from None
        if isinstance(problem, OutOfRange):
            path = _join(path, problem.field)
        value = _value_at(values, path.removeprefix(prefix).lstrip("."))
        wording = describe_type(annotation)
        if isinstance(problem, OutOfRange):
            wording = problem.expected
        elif isinstance(problem, NotAccepted) and problem.key:
            path, value, wording = _join(path, problem.key), problem.value, problem.expected
        source = source_of(path)
        shown = _shown(value)
        if isinstance(problem, OutOfRange | NotAccepted):
            raise ConfigError(f"{path} = {shown} (from {source}): expected {expected_of(path) or wording}") from None
        text = _text_of(problem)
        said = _VALIDATOR_TEXT.fullmatch(text)
        raise ConfigError(f"{path} = {shown} (from {source}): {said['what'] if said else text}") from problem


def _first_problem(error: ClassValidationError, path: str) -> tuple[str, Exception, Any]:
    """Path, cause and type of the first problem below ``path``."""
    noted, bare = error.group_exceptions()
    for problem, note in noted:
        below = _join(path, note.name)
        return (
            _first_problem(problem, below) if isinstance(problem, ClassValidationError) else (below, problem, note.type)
        )
    problem = bare[0]
    if isinstance(problem, ClassValidationError):
        return _first_problem(problem, path)
    said = _VALIDATOR_TEXT.fullmatch(_text_of(problem))
    known = said is not None and any(field.name == said["field"] for field in attrs.fields(error.cl))
    return (_join(path, said["field"]) if said and known else path), problem, None


def _text_of(problem: Exception) -> str:
    """The message alone: validators of attrs raise it with the field and what they compared."""
    return str(problem.args[0] if problem.args else problem)


def _unknown_key(problem: ForbiddenExtraKeysError, path: str, source_of: Callable[[str], str]) -> ConfigError:
    unknown = _join(path, min(problem.extra_fields))
    names = [_join(path, field.name) for field in attrs.fields(problem.cl)]
    return ConfigError(f"unknown setting {unknown!r} (from {source_of(unknown)}){nearest(unknown, names)}")


def _value_at(values: Any, path: str) -> Any:
    for part in path.split(".") if path else ():
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def _shown(value: Any) -> str:
    text = str(value) if isinstance(value, Text) and value else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
