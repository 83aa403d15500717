"""A strict reader of Prometheus' text format, version 0.0.4, written from its description and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import attrs

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
COMMENT = re.compile(rf"# (HELP|TYPE) ({NAME}) (.*)")
SAMPLE = re.compile(rf"({NAME})(?:\{{(.*)\}})? (\S+)")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"(?:,|$)')
KINDS = ("counter", "gauge", "histogram", "summary", "untyped")

Labels = tuple[tuple[str, str], ...]


@attrs.define
class Family:
    """One metric: its kind, and ``(sample name, labels) -> value``."""

    kind: str
    help: str
    samples: dict[tuple[str, Labels], float] = attrs.field(factory=dict)


def read_exposition(text: str) -> Mapping[str, Family]:
    """Families by name. Raises AssertionError for whatever the description does not allow."""
    assert text.endswith("\n")
    families: dict[str, Family] = {}
    current, helps = "", dict[str, str]()
    for line in text[:-1].split("\n"):
        assert line == line.strip()
        if line.startswith("#"):
            found = COMMENT.fullmatch(line)
            assert found, line
            word, name, rest = found.groups()
            assert name not in families, "one group of lines for each metric, and its kind before its samples"
            if word == "HELP":
                assert name not in helps
                helps[name] = rest
            else:
                assert rest in KINDS
                families[name] = Family(rest, helps.get(name, ""))
                current = name
            continue
        found = SAMPLE.fullmatch(line)
        assert found, line
        name, inside, number = found.groups()
        family = families[current]
        suffixes = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
        assert name in {current + suffix for suffix in suffixes}, line
        key = name, tuple(sorted(_labels(inside or "")))
        assert key not in family.samples, line
        family.samples[key] = float(number)
    for name, family in families.items():
        _check(name, family)
    return families


def _labels(inside: str) -> Iterator[tuple[str, str]]:
    place, names = 0, set()
    while place < len(inside):
        found = LABEL.match(inside, place)
        assert found, inside
        name, raw = found.groups()
        assert name not in names
        names.add(name)
        yield name, re.sub(r"\\(.)", lambda escaped: {"n": "\n"}.get(escaped[1], escaped[1]), raw)
        place = found.end()


def _check(name: str, family: Family) -> None:
    if family.kind == "counter":
        assert all(value >= 0 for value in family.samples.values())
    if family.kind != "histogram":
        return
    series: dict[Labels, list[tuple[float, float]]] = {}
    for (sample, labels), value in family.samples.items():
        if sample == f"{name}_bucket":
            bound = float(dict(labels)["le"])
            series.setdefault(tuple(label for label in labels if label[0] != "le"), []).append((bound, value))
    for labels, buckets in series.items():
        bounds, counts = zip(*buckets, strict=True)
        assert list(bounds) == sorted(set(bounds)), "bounds ascend"
        assert bounds[-1] == float("inf")
        assert list(counts) == sorted(counts), "buckets are cumulative"
        assert counts[-1] == family.samples[f"{name}_count", labels]
        assert (f"{name}_sum", labels) in family.samples
