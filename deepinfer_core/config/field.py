"""How a setting is declared: an attrs field with help, unit, environment alias and a range check."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs

from deepinfer_core.api import ConfigError


class OutOfRange(ConfigError):
    """A value of the right type that its field's check refuses."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"{field} = {value!r}: expected {expected}")
        self.field = field
        self.value = value
        self.expected = expected


@attrs.frozen
class Check:
    """A condition on a value and its wording, which completes "expected an integer, ..."."""

    text: str
    holds: Callable[[Any], bool]


def at_least(minimum: int) -> Check:
    return Check(f"at least {minimum}", lambda value: value >= minimum)


def between(minimum: int, most: int) -> Check:
    """For counts of what is allocated when the engine starts."""
    return Check(f"at least {minimum} and at most {most}", lambda value: minimum <= value <= most)


def fraction() -> Check:
    """A share of something: above 0, at most 1."""
    return Check("above 0 and at most 1", lambda value: 0 < value <= 1)


def each_positive() -> Check:
    """For lists of numbers: not empty, each finite and above 0."""
    return Check(
        "each above 0, at least one",
        lambda values: bool(values) and all(math.isfinite(value) and value > 0 for value in values),
    )


def positive() -> Check:
    """A finite number above 0."""
    return Check("above 0", lambda value: 0 < value < math.inf)


def not_empty() -> Check:
    return Check("not empty", bool)


def only(value: object, reason: str) -> Check:
    """For a setting that has one legal value so far."""
    return Check(f"only {value!r} so far, as {reason}", lambda given: bool(given == value))


def setting(
    default: Any,
    *,
    help: str,
    unit: str = "",
    env: str = "",
    check: Check | None = None,
) -> Any:
    """An attrs field.

    Args:
        default: value when no source gives one; a callable is a factory.
        help: one or two sentences for the manual.
        unit: of a number, for the manual.
        env: a second environment variable for it, besides ``DEEPINFER_<GROUP>__<FIELD>``.
        check: condition that every value except None must meet.
    """

    def validate(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if check is not None and value is not None and not check.holds(value):
            raise OutOfRange(attribute.name, value, check.text)

    how: dict[str, Any] = {"factory": default} if callable(default) else {"default": default}
    return attrs.field(
        **how,
        validator=validate,
        metadata={"help": help, "unit": unit, "env": env, "check": check.text if check else ""},
    )
