"""Collect the text, set files aside, train the vocabulary, and write token streams.

    python -m deepinfer_demo_v4.recipe.corpus --docs DIR --out DIR

``--docs`` is the folder ``html/_sources`` of Debian's package python3.11-doc. The standard library is the running
interpreter's, and packages are taken from where it finds them, so versions are those of the environment; the ones that
were used are in the model card.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import lzma
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .vocabulary import BOS_ID, EOS_ID, train_tokenizer

PACKAGES: Mapping[str, str] = {
    "anyio": "MIT",
    "attr": "MIT",
    "cattrs": "MIT",
    "click": "BSD-3-Clause",
    "dateutil": "Apache-2.0 / BSD-3-Clause",
    "fontTools": "MIT",
    "fsspec": "BSD-3-Clause",
    "hatchling": "MIT",
    "huggingface_hub": "Apache-2.0",
    "jinja2": "BSD-3-Clause",
    "markdown_it": "MIT",
    "matplotlib": "PSF-based",
    "mypy": "MIT",
    "networkx": "BSD-3-Clause",
    "numpy": "BSD-3-Clause",
    "packaging": "Apache-2.0 / BSD-2-Clause",
    "pydantic": "MIT",
    "pyparsing": "MIT",
    "_pytest": "MIT",
    "requests": "Apache-2.0",
    "rich": "MIT",
    "scipy": "BSD-3-Clause",
    "structlog": "MIT / Apache-2.0",
    "tomlkit": "MIT",
    "torch": "BSD-3-Clause",
    "typer": "MIT",
    "urllib3": "MIT",
    "yaml": "MIT",
}
"""Import name -> licence: permissive ones only."""

LARGEST = 200_000
"""Bytes: larger files are tables or generated."""
HELD_OUT_OF = 10
"""One file in so many of the standard library and the documentation is held out."""


@dataclass(frozen=True)
class Document:
    """``name``: ``stdlib/json/decoder.py``, ``docs/library/json.rst``, ``numpy/...``."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """By a hash of the name, so that the same files are held out whatever else is collected."""
        source, _, rest = self.name.partition("/")
        if source not in ("stdlib", "docs") or rest.startswith(("test/", "whatsnew/")) or "/test" in rest:
            return False
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4]) % HELD_OUT_OF == 0


def documents(docs: Path) -> Iterator[Document]:
    """Every usable file once, in order of name."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    yield from _of("stdlib", stdlib, ".py", ("site-packages", "lib2to3", "idlelib", "encodings", "pydoc_data"))
    yield from _of("docs", docs, ".txt", ("changelog",))
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(f"package {package!r} is not installed here; it is part of the corpus")
        yield from _of(package, Path(next(iter(spec.submodule_search_locations))), ".py", ("_vendor",))


def _of(source: str, root: Path, suffix: str, without: tuple[str, ...]) -> Iterator[Document]:
    for path in sorted(root.rglob(f"*{suffix}")):
        relative = path.relative_to(root).as_posix().removesuffix(".txt")
        if any(part in relative for part in without) or path.stat().st_size > LARGEST:
            continue
        try:
            text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        if _is_prose_or_code(text):
            yield Document(f"{source}/{relative}", text)


def _is_prose_or_code(text: str) -> bool:
    """Not empty, not a table of numbers, not another script than Latin."""
    if len(text) < 200:
        return False
    digits = sum(map(str.isdigit, text)) / len(text)
    return digits < 0.12 and len(text.encode()) < 1.02 * len(text)


def unique(found: Iterator[Document]) -> Iterator[Document]:
    """Without repetitions of the same text."""
    seen: set[bytes] = set()
    for document in found:
        digest = hashlib.sha256(document.text.encode()).digest()
        if digest not in seen:
            seen.add(digest)
            yield document


def write_stream(path: Path, streams: list[list[int]]) -> int:
    """Token ids of all documents as ``<bos> ... <eos>``, little-endian uint16, LZMA; returns their number."""
    flat = np.concatenate([np.array([BOS_ID, *ids, EOS_ID], dtype="<u2") for ids in streams])
    path.write_bytes(lzma.compress(flat.tobytes(), preset=1))
    return len(flat)


def read_stream(path: Path) -> np.ndarray:
    """What :func:`write_stream` wrote, ``[n]`` uint16."""
    return np.frombuffer(lzma.decompress(path.read_bytes()), dtype="<u2")


def main() -> None:
    """Write tokenizer.json, train.xz, held_out.xz, held_out.json and corpus.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--limit", type=int, help="documents; for a rehearsal")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found = list(unique(documents(options.docs)))
    if options.limit:
        found = found[:: max(1, len(found) // options.limit)]
    training = [d for d in found if not d.held_out]
    held = [d for d in found if d.held_out]
    sizes: dict[str, int] = {}
    for document in training:
        source = document.name.partition("/")[0]
        sizes[source] = sizes.get(source, 0) + len(document.text.encode())
    print(f"{len(training)} documents, {sum(sizes.values()) / 1e6:.1f} MB; {len(held)} held out", flush=True)
    # Half of the text is enough for 4,096 entries; the standard library and the documentation count in full.
    sample = [d.text for i, d in enumerate(training) if i % 3 == 0 or d.name.startswith(("stdlib/", "docs/"))]
    tokenizer = train_tokenizer(sample, options.vocabulary)
    tokenizer.save(str(options.out / "tokenizer.json"))
    print("vocabulary trained", flush=True)
    counts = {}
    for name, part in (("train", training), ("held_out", held)):
        encoded: list[list[int]] = []
        for start in range(0, len(part), 256):
            texts = [d.text for d in part[start : start + 256]]
            encoded += [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
        counts[name] = write_stream(options.out / f"{name}.xz", encoded)
    listed = [
        {"name": d.name, "bytes": len(d.text.encode()), "sha256": hashlib.sha256(d.text.encode()).hexdigest()}
        for d in held
    ]
    (options.out / "held_out.json").write_text(json.dumps(listed, indent=1) + "\n")
    summary = {"bytes": sizes, "tokens": counts, "documents": len(training), "held_out_documents": len(held)}
    (options.out / "corpus.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
