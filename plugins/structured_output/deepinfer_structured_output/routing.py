"""Which library compiles a grammar: one that is known to enforce all of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from deepinfer_core.api import ConstraintSpec, InvalidRequestError

from .schema import features, is_plain, tags_of

LIBRARIES = ("llguidance", "xgrammar")
ENFORCED, NARROWER = "enforced", "narrower"

PREFERRED: Mapping[str, Sequence[str]] = {
    "json": ("llguidance", "xgrammar"),
    "json_object": ("llguidance", "xgrammar"),
    "regex": ("llguidance", "xgrammar"),
    "choice": ("llguidance", "xgrammar"),
    "ebnf": ("xgrammar", "llguidance"),
    "structural_tags": ("llguidance", "xgrammar"),
}
"""By what was measured: llguidance refuses what it cannot do, and bounds its own work. EBNF goes to xgrammar, which
reads it as written; for llguidance it has to be split into words and sentences, and a word takes all it can."""


@cache
def keyword_table() -> Mapping[str, Mapping[str, str]]:
    """Keyword -> library -> ``enforced``, ``narrower``, ``refused`` or ``wrong``, as the tests measured it."""
    table: dict[str, dict[str, str]] = json.loads(files(__package__).joinpath("keywords.json").read_text("utf-8"))
    return table


def libraries_for(spec: ConstraintSpec, allowed: Sequence[str]) -> list[str]:
    """Those of ``allowed`` that enforce a grammar, best first.

    Raises:
        InvalidRequestError: none does; names the keywords.
    """
    names = [name for name in PREFERRED[spec.kind] if name in allowed]
    for schema in schemas_of(spec):
        found = list(features(schema))
        lacking = {name: _lacking(name, found, schema) for name in names}
        names = [name for name in names if not lacking[name]]
        if not names:
            fewest = min(lacking.values(), key=len, default=[])
            tried = " and ".join(lacking)
            raise InvalidRequestError(
                f"structured_outputs: JSON Schema {', '.join(map(repr, fewest))}: not enforced by {tried}, "
                "so the request is refused; see the table in docs/structured_output.md"
            )
    return names


def schemas_of(spec: ConstraintSpec) -> list[Any]:
    """The JSON Schemas in a grammar."""
    if spec.kind == "json":
        return [json.loads(spec.text)]
    if spec.kind == "structural_tags":
        return [tag["schema"] for _, tags in tags_of(spec) for tag in tags]
    return []


def _lacking(library: str, found: Sequence[str], schema: Any) -> list[str]:
    """Features that a library does not enforce; for one that combines keywords wrongly, the whole of other schemas."""
    table = keyword_table()
    lacking = [name for name in found if table.get(name, {}).get(library) not in (ENFORCED, NARROWER)]
    if library == "xgrammar" and not lacking and not is_plain(schema):
        return ["a schema without 'type', or with keywords to be combined"]
    return lacking
