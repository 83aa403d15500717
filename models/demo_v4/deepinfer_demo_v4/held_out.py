"""Files that took no part in training: text to measure speculation on, and to learn drafters' settings from."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import NamedTuple

LIST = Path(__file__).parent / "held_out.json"


class HeldOutFile(NamedTuple):
    """A file as it was: ``stdlib/...`` of CPython 3.11.7, or ``docs/...`` of Debian's python3.11-doc 3.11.2."""

    name: str
    bytes: int
    sha256: str


def held_out_files() -> list[HeldOutFile]:
    """All of them, in order of name within each source."""
    return [HeldOutFile(**entry) for entry in json.loads(LIST.read_text(encoding="utf-8"))]


def held_out_texts() -> dict[str, str]:
    """Name -> text of those that this interpreter's standard library has.

    Another release of Python has other texts under these names, and lacks some of them; the model has not read those
    either, but has read files that are much like parts of them.
    """
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    found = {}
    for file in held_out_files():
        source, _, rest = file.name.partition("/")
        if source == "stdlib" and (stdlib / rest).is_file():
            found[file.name] = (stdlib / rest).read_text(encoding="utf-8")
    return found
