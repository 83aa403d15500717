"""Rules of an EBNF grammar that no text can come to the end of.

A rule is *productive* when some alternative of it has only productive parts; the least set of such rules is found by
going over the grammar until nothing is added (Hopcroft, Motwani, Ullman, *Introduction to Automata Theory*, 7.1). A
library follows an unproductive rule as willingly as any other, into a text that never ends, so it is refused.

Only what decides this is read: names, alternatives, groups and repetition. A grammar with anything else in it is left
to its library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import attrs

from deepinfer_core.api import InvalidRequestError

_TOKEN = re.compile(
    r"""\s*(?:\#[^\n]*\s*)*(?:
      (?P<text>"(?:[^"\\\n]|\\.)*") | (?P<set>\[(?:[^\]\\]|\\.)*\])
    | (?P<head>[A-Za-z_][\w.-]*)\s*::= | (?P<name>[A-Za-z_][\w.-]*)
    | (?P<times>[*+?]|\{\s*\d*\s*,?\s*\d*\s*\}) | (?P<mark>[()|])
    )""",
    re.VERBOSE | re.DOTALL,
)


_REST = re.compile(r"\s*(?:#[^\n]*\s*)*\Z")


@attrs.frozen
class Choice:
    """``alternatives``, each a sequence of parts: a rule's name, a choice in brackets, or nothing for plain text."""

    alternatives: tuple[tuple[Part, ...], ...]


Part: TypeAlias = "str | Choice"


class _Unread(Exception):
    """The grammar has something that is not read here."""


def check_productive(grammar: str) -> None:
    """Refuse a grammar with a rule, reachable from ``root``, that no text can come to the end of.

    Raises:
        InvalidRequestError: names the rules.
    """
    try:
        rules = _read(grammar)
    except _Unread:
        return
    ending = _productive(rules)
    stuck = [name for name in _reachable(rules) if name in rules and name not in ending]
    if stuck:
        rule, again = ("rule", "the rule") if len(stuck) == 1 else ("rules", "one of them")
        raise InvalidRequestError(
            f"structured_outputs: EBNF {rule} {', '.join(map(repr, stuck))}: no text "
            f"comes to an end there, since every alternative needs {again} again; add one that does not"
        )


def _productive(rules: Mapping[str, Choice]) -> set[str]:
    found: set[str] = set()
    while more := {name for name, body in rules.items() if name not in found and _ends(body, rules, found)}:
        found |= more
    return found


def _ends(part: Part, rules: Mapping[str, Choice], found: set[str]) -> bool:
    if isinstance(part, str):
        return part in found or part not in rules  # a name without a rule is the library's to refuse
    return any(all(_ends(one, rules, found) for one in sequence) for sequence in part.alternatives)


def _reachable(rules: Mapping[str, Choice]) -> dict[str, None]:
    found: dict[str, None] = {}
    pending: list[Part] = ["root"]
    while pending:
        part = pending.pop()
        if isinstance(part, Choice):
            pending += [one for sequence in reversed(part.alternatives) for one in reversed(sequence)]
        elif part not in found:
            found[part] = None
            if part in rules:
                pending.append(rules[part])
    return found


# ---- reading

_Token = tuple[str, str]


def _tokens(grammar: str) -> list[_Token]:
    found, place = [], 0
    while not _REST.match(grammar, place):
        token = _TOKEN.match(grammar, place)
        if token is None or token.lastgroup is None:
            raise _Unread
        found.append((token.lastgroup, token[token.lastgroup]))
        place = token.end()
    return found


def _read(grammar: str) -> dict[str, Choice]:
    tokens = _tokens(grammar)
    rules: dict[str, Choice] = {}
    place = 0
    while place < len(tokens):
        kind, name = tokens[place]
        if kind != "head" or name in rules:
            raise _Unread
        rules[name], place = _choice(tokens, place + 1)
    return rules


def _choice(tokens: Sequence[_Token], place: int) -> tuple[Choice, int]:
    """Alternatives up to a closing bracket or the next rule's head, and where they end."""
    alternatives: list[tuple[Part, ...]] = []
    parts: list[Part] = []
    while place < len(tokens) and tokens[place][0] != "head" and tokens[place][1] != ")":
        kind, text = tokens[place]
        place += 1
        if text == "|" and kind == "mark":
            alternatives.append(tuple(parts))
            parts = []
        elif kind == "mark":
            inner, place = _choice(tokens, place)
            if place == len(tokens) or tokens[place][1] != ")":
                raise _Unread
            place += 1
            parts.append(inner)
        elif kind == "times":
            if not parts:
                raise _Unread
            if text in "*?" or re.match(r"\{\s*(0+\s*[,}]|,)", text):
                parts.append(Choice(((), (parts.pop(),))))  # none of it is enough
        elif kind == "name":
            parts.append(text)
        else:
            parts.append(Choice(((),)))
    return Choice((*alternatives, tuple(parts))), place
