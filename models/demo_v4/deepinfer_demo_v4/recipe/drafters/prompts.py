"""Beginnings of texts, for the target to continue.

    python -m deepinfer_demo_v4.recipe.drafters.prompts --docs DIR --out FILE

``--docs`` as for ``recipe.corpus``, whose documents these are; what is held out there is held out
here. Half are windows from anywhere, the others begin where a user would: at a definition, at a docstring, and at
records in JSON of what a file defines.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from deepinfer_demo_v4 import CHECKPOINT
from deepinfer_demo_v4.recipe.corpus import Document, documents, unique

SHARES = {"window": 0.5, "code": 0.2, "prose": 0.15, "json": 0.15}
CHARACTERS = 600
"""Cut from a document for one prompt, before it is cut to its tokens."""
A_DOCUMENT = 24
"""Prompts of a kind that one document may give."""


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, required=True)
    parser.add_argument(
        "--out", type=Path, required=True, help="an .npz with 'train' and 'held_out', [N, length] uint16"
    )
    parser.add_argument("--count", type=int, default=49152)
    parser.add_argument("--held-out", type=int, default=1024)
    parser.add_argument("--length", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--limit", type=int, help="documents; for a rehearsal")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def beginnings(kind: str, text: str, rng: random.Random) -> Iterator[str]:
    """Where prompts of a kind may begin in one document, with what follows."""
    if kind == "window":
        for _ in range(A_DOCUMENT):
            start = rng.randrange(max(1, len(text) - CHARACTERS))
            yield text[start : start + CHARACTERS]
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    definitions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    rng.shuffle(definitions)
    if kind == "code":
        lines = text.splitlines(keepends=True)
        for node in definitions[:A_DOCUMENT]:
            yield "".join(lines[node.lineno - 1 : node.lineno + 30])[:CHARACTERS]
    elif kind == "prose":
        said: list[ast.Module | ast.FunctionDef | ast.ClassDef] = [tree, *definitions]
        for documented in said:
            yield (ast.get_docstring(documented) or "")[:CHARACTERS]
    else:
        records = [
            {"name": n.name, "line": n.lineno, "arguments": [a.arg for a in n.args.args]}
            for n in sorted(definitions, key=lambda n: n.lineno)
            if isinstance(n, ast.FunctionDef)
        ]
        for start in range(0, min(len(records), 6 * A_DOCUMENT), 6):
            yield json.dumps(records[start : start + 6], indent=1)[:CHARACTERS]


def prompts(found: Sequence[Document], count: int, length: int, seed: int) -> np.ndarray:
    """``[count, length]`` uint16, in the shares of :data:`SHARES`.

    Raises:
        ValueError: the documents have too few beginnings.
    """
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    rng = random.Random(seed)
    parts = []
    for kind, share in SHARES.items():
        texts = [text for document in found for text in beginnings(kind, document.text, rng) if len(text) > length]
        rng.shuffle(texts)
        wanted, rows = round(count * share), []
        for start in range(0, len(texts), 512):
            encoded = tokenizer.encode_batch(texts[start : start + 512], add_special_tokens=False)
            rows += [e.ids[:length] for e in encoded if len(e.ids) >= length]
            if len(rows) >= wanted:
                break
        if len(rows) < wanted:
            raise ValueError(f"{len(rows)} prompts of kind {kind!r}, {wanted} wanted: lower --count")
        parts += rows[:wanted]
    rng.shuffle(parts)
    return np.array(parts, np.uint16)


def main() -> None:
    """Write both sets."""
    o = arguments()
    found = list(unique(documents(o.docs)))
    if o.limit:
        found = found[:: max(1, len(found) // o.limit)]
    training = [d for d in found if not d.held_out]
    held = [d for d in found if d.held_out]
    sets = {
        "train": prompts(training, o.count, o.length, o.seed),
        "held_out": prompts(held, o.held_out, o.length, o.seed + 1),
    }
    np.savez_compressed(o.out, train=sets["train"], held_out=sets["held_out"])
    print(json.dumps({name: list(rows.shape) for name, rows in sets.items()}), f"{o.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
