"""What each library makes of every JSON Schema keyword: the public test suite, and schemas like those people write.

``python tests/structured_output/keyword_suite.py`` writes the table that the plugin routes by, and the one in the
documentation.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import jsonschema
from deepinfer_structured_output.compiler import Grammar
from deepinfer_structured_output.schema import features, is_plain, says_nothing, simplified, subschemas
from grammar_vocabularies import accepts_bytes, compiler, dumped, spec
from keyword_cases import CASES

from deepinfer_core.api import ConstraintSpec

ROOT = Path(__file__).parents[2]
SUITE = ROOT / "tests" / "golden" / "json_schema_test_suite" / "draft2020-12"
TABLE = ROOT / "plugins" / "structured_output" / "deepinfer_structured_output" / "keywords.json"
PAGE = ROOT / "docs" / "structured_output.md"
BEGIN, END = "<!-- keywords: begin -->\n", "<!-- keywords: end -->\n"

SUBJECTS: Mapping[str, tuple[str, ...]] = {
    "anchor": ("$anchor",),
    "boolean_schema": ("false",),
    "defs": ("$defs",),
    "dependencies-compatibility": ("dependencies",),
    "dynamicRef": ("$dynamicRef", "$dynamicAnchor"),
    "ecmascript-regex": ("pattern",),
    "non-bmp-regex": ("pattern",),
    "if-then-else": ("if", "then", "else"),
    "infinite-loop-detection": ("$ref",),
    "ref": ("$ref",),
    "refRemote": ("$ref to another document",),
    "bignum": ("type",),
    "unknownKeyword": ("$id",),
}
"""File of the suite -> features it is about, where it is not named like one."""

TYPES = {
    "string": ["minLength", "maxLength", "pattern", "format"],
    "number": ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"],
    "array": ["items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains", "maxContains"],
    "object": [
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas"),
    ],
}
KNOWN_DIFFERENCES = {("pattern", '"\ufeff"')}
r"""ECMA-262 counts U+FEFF as white space, Unicode and Python do not; it matters for ``\s`` and ``\S`` alone."""


@attrs.frozen
class Case:
    """A schema, the features it is about, and documents with the verdict on each."""

    subjects: tuple[str, ...]
    schema: Any
    documents: Sequence[tuple[Any, bool]]
    source: str


def suite_cases() -> Iterator[Case]:
    for file in sorted(SUITE.rglob("*.json")):
        name = f"format: {file.stem}" if file.parent.name == "format" else file.stem
        for group in json.loads(file.read_text(encoding="utf-8")):
            documents = [(test["data"], test["valid"]) for test in group["tests"]]
            if file.parent.name == "format":
                documents = [(data, valid) for data, valid in documents if isinstance(data, str)]
            subjects = SUBJECTS.get(name, (name,))
            if "$ref to another document" in features(group["schema"]):
                subjects = ("$ref to another document",)
            yield Case(subjects, group["schema"], documents, f"{name}: {group['description']}")


def own_cases() -> Iterator[Case]:
    for name, (schema, good, bad) in CASES.items():
        documents = [*((data, True) for data in good), *((data, False) for data in bad)]
        yield Case(tuple(name.strip().split(" + ")), schema, documents, f"own: {name}")


def plain_variant(case: Case) -> Case | None:
    """The case with a type at every schema that names none; None when it is still not plain."""
    typed = _typed(simplified(case.schema))
    if not is_plain(typed):
        return None
    validator = jsonschema.Draft202012Validator(typed, format_checker=jsonschema.FormatChecker())
    try:
        typed_documents = [(data, valid and validator.is_valid(data)) for data, valid in case.documents]
    except Exception:  # a reference to another document
        return None
    return attrs.evolve(case, schema=typed, documents=typed_documents)


def _typed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return {"type": "string"} if schema is True else schema
    out = dict(schema)
    for keyword in ("properties", "patternProperties", "$defs"):
        if keyword in out:
            out[keyword] = {name: _typed(one) for name, one in out[keyword].items()}
    for keyword in ("items", "additionalProperties", "propertyNames", "contains"):
        if isinstance(out.get(keyword), Mapping):
            out[keyword] = _typed(out[keyword])
    for keyword in ("prefixItems", "anyOf", "oneOf", "allOf"):
        if keyword in out:
            out[keyword] = [_typed(one) for one in out[keyword]]
    implied = [kind for kind, keywords in TYPES.items() if out.keys() & set(keywords)]
    if "type" not in out and len(implied) == 1:
        out["type"] = implied[0]
    return out


def outcome(library: str, case: Case) -> Counter[str]:
    """How often a library was ``right``, ``wrong`` (took an invalid document), ``narrower`` or ``refused``."""
    found = spec(json=simplified(case.schema))
    try:
        grammar = compiled_by(library, found)
    except ValueError:
        return Counter(refused=1)
    counts: Counter[str] = Counter()
    for data, valid in case.documents:
        taken = accepts_bytes(grammar, found, dumped(data))
        if taken == valid or (case.subjects[0], dumped(data)) in KNOWN_DIFFERENCES:
            counts["right"] += 1
        else:
            counts["wrong" if taken else "narrower"] += 1
    if any(
        subject in ("minLength", "maxLength", "pattern") or subject.startswith("format") for subject in case.subjects
    ):
        counts["wrong"] += takes_raw_control(grammar, found)
    return counts


def takes_raw_control(grammar: Grammar, found: ConstraintSpec) -> bool:
    """Whether a string may hold a control character as it is, which is no JSON (RFC 8259, section 7)."""
    state = grammar.start(found)
    return state.accept([ord('"')]) == 1 and any(state.accept([code]) for code in range(32))


def compiled_by(library: str, found: ConstraintSpec) -> Grammar:
    """Compile with a library, whatever the routing table says of it.

    Raises:
        ValueError: the library refuses the schema.
    """
    one = compiler(library, merged=False)
    opened, sets = one._library(library)
    return Grammar(library, opened.compile(found), sets)


def saying_nothing(schema: Any) -> set[str]:
    """Keywords of a schema that no library sees, since they leave out no document wherever they stand in it."""
    said = [one for one in subschemas(schema) if isinstance(one, Mapping)]
    return {keyword for one in said for keyword in one if says_nothing(keyword, one)} - features(schema).keys()


def measure() -> dict[str, dict[str, Counter[str]]]:
    """Feature -> column -> counts. Columns: each library, and xgrammar on plain schemas alone."""
    found: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for case in (*suite_cases(), *own_cases()):
        plain = plain_variant(case)
        for subject in set(case.subjects) - saying_nothing(case.schema):
            for library in ("llguidance", "xgrammar"):
                found[subject][library] += outcome(library, case)
            if plain is not None:
                found[subject]["xgrammar, plain"] += outcome("xgrammar", plain)
    return found


def status(counts: Counter[str]) -> str:
    if counts["wrong"]:
        return "wrong"
    if not counts["right"]:
        return "refused"
    return "narrower" if counts["narrower"] else "enforced"


def table(measured: Mapping[str, Mapping[str, Counter[str]]]) -> dict[str, dict[str, str]]:
    """What the plugin routes by: xgrammar is asked for plain schemas only."""
    return {
        feature: {
            "llguidance": status(columns["llguidance"]),
            "xgrammar": status(columns.get("xgrammar, plain", Counter())),
        }
        for feature, columns in sorted(measured.items())
    }


def page_section(measured: Mapping[str, Mapping[str, Counter[str]]]) -> str:
    lines = ["| keyword | llguidance | xgrammar | xgrammar, plain schemas | here |", "|---|---|---|---|---|"]
    for feature, row in table(measured).items():
        columns = measured[feature]
        cells = [_cell(columns.get(name, Counter())) for name in ("llguidance", "xgrammar", "xgrammar, plain")]
        if row["llguidance"] in ("enforced", "narrower"):
            route = "llguidance"
        else:
            route = "xgrammar, plain schemas only" if row["xgrammar"] in ("enforced", "narrower") else "refused"
        lines.append(f"| `{feature}` | {' | '.join(cells)} | {route} |")
    return "\n".join(lines) + "\n"


def _cell(counts: Counter[str]) -> str:
    if not counts:
        return "-"
    word = status(counts)
    extra = []
    if word == "wrong":
        extra.append(f"{counts['wrong']} of {counts.total() - counts['refused']}")
    if word == "narrower":
        extra.append(f"{counts['narrower']} of {counts.total() - counts['refused']}")
    if word != "refused" and counts["refused"]:
        extra.append(f"refuses {counts['refused']}")
    return word + (f" ({', '.join(extra)})" if extra else "")


def with_section(page: str, section: str) -> str:
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + section + END + rest.partition(END)[2]


def main() -> None:
    measured = measure()
    TABLE.write_text(json.dumps(table(measured), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), page_section(measured)), encoding="utf-8")
    print(f"{len(measured)} features; {TABLE.relative_to(ROOT)} and {PAGE.relative_to(ROOT)} written")


if __name__ == "__main__":
    main()
