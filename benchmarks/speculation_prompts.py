"""Prompts of three kinds from standard-library files that took no part in training: code, prose, JSON."""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Iterator

from deepinfer_demo_v4.held_out import held_out_texts

KINDS = ("code", "prose", "json")


def prompts(kind: str, count: int, seed: int = 0) -> list[str]:
    """Beginnings of held-out text of one kind, about 300 characters each."""
    rng, texts = random.Random(seed), held_out_texts()
    found = list(dict.fromkeys(text for name in sorted(texts) for text in _of_kind(kind, texts[name])))
    rng.shuffle(found)
    if len(found) < count:
        raise SystemExit(f"{len(found)} held-out prompts of kind {kind!r}, {count} wanted: lower --prompts")
    return found[:count]


def _of_kind(kind: str, text: str) -> Iterator[str]:
    tree = ast.parse(text)
    definitions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    if kind == "code":
        lines = text.splitlines(keepends=True)
        for node in definitions:
            part = "".join(lines[node.lineno - 1 : node.lineno + 9])[:300]
            if len(part) > 150:
                yield part
    elif kind == "prose":
        for node in [tree, *definitions]:
            said = ast.get_docstring(node) or ""
            if len(said) > 200:
                yield said[:300]
    else:
        records = [
            {"name": n.name, "line": n.lineno, "arguments": [a.arg for a in n.args.args]}
            for n in definitions
            if isinstance(n, ast.FunctionDef)
        ]
        for start in range(0, len(records) - 6, 6):
            yield json.dumps(records[start : start + 6], indent=1)[:300]
