"""JSON Schemas that people wrote for their programs; ``tests/golden/real_schemas/README.md`` says whose.

``python tests/structured_output/real_schemas.py`` writes into the documentation how many of them the plugin takes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from deepinfer_structured_output.compiler import GrammarCompiler
from grammar_vocabularies import compiler, spec
from keyword_suite import PAGE

from deepinfer_core.api import InvalidRequestError

BEGIN, END = "<!-- real schemas: begin -->\n", "<!-- real schemas: end -->\n"
FOLDER = Path(__file__).parents[1] / "golden" / "real_schemas"
SOURCES: Mapping[str, str] = {
    "aws": "resources of a cloud",
    "openai": "requests and answers of a model's interface",
    "mcp": "messages between models and tools",
    "config": "files that programs are configured by",
}
"""File -> what its schemas describe."""


@attrs.frozen
class RealSchema:
    source: str
    name: str
    schema: Any


def real_schemas() -> list[RealSchema]:
    found = []
    for source in SOURCES:
        for line in (FOLDER / f"{source}.jsonl").read_text(encoding="utf-8").strip("\n").split("\n"):
            record = json.loads(line)
            found.append(RealSchema(source, record["name"], record["schema"]))
    return found


def refusal(schema: Any, one: GrammarCompiler | None = None) -> str | None:
    """Why the plugin does not take a schema: what is lacking, in a few words; None when it does."""
    try:
        (one or compiler()).compile(spec(json=schema))
    except InvalidRequestError as error:
        text = str(error)
    else:
        return None
    if "not enforced by" in text:
        return "a keyword nobody enforces"
    if "regex" in text:
        return "a pattern that no automaton has"
    return "a reference to another document" if "not present in a registry" in text else "`oneOf` that may overlap"


def lacking(schema: Any) -> list[str]:
    """The keywords that a refused schema is refused for."""
    try:
        compiler().check(spec(json=schema))
    except InvalidRequestError as error:
        return re.findall(r"'([^']+)'", str(error).partition(": not enforced")[0])
    return []


def page_section() -> str:
    """Sources and how many of their schemas are taken, and what the others are refused for."""
    rows, reasons, keywords = [], Counter[str](), Counter[str]()
    found = real_schemas()
    for source, about in SOURCES.items():
        schemas = [one.schema for one in found if one.source == source]
        refused = [(schema, reason) for schema in schemas if (reason := refusal(schema)) is not None]
        reasons.update(reason for _, reason in refused)
        keywords.update(keyword for schema, _ in refused for keyword in lacking(schema))
        rows.append(f"| {about} | {len(schemas)} | {len(schemas) - len(refused)} |")
    common = ", ".join(f"`{keyword}` {count}" for keyword, count in keywords.most_common(6) if count > 1)
    causes = "; ".join(f"{reason}: {count}" for reason, count in reasons.most_common())
    head = ["| schemas of | there are | taken |", "|---|---|---|"]
    return "\n".join([*head, *rows, "", f"Why the others are refused: {causes}. The keywords: {common}."]) + "\n"


def with_section(page: str, section: str) -> str:
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + section + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), page_section()), encoding="utf-8")
