"""Cost tables on disk, so that an engine that starts again need not measure again.

A file is named after what its measurement holds for: model, device, versions, operators. Only files of this name are
ever read or replaced; whatever else lies in the directory is left alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

OFF = "off"
Table = list[tuple[int, float]]


def cache_directory(setting: str) -> Path | None:
    """The directory of a ``cost_cache`` setting, None when it is off."""
    if setting == OFF:
        return None
    if setting:
        return Path(setting).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "deepinfer" / "step_costs"


def file_name(key: Mapping[str, str], rows: Sequence[int]) -> str:
    """Of the table for this key and these step sizes."""
    text = json.dumps({"key": dict(sorted(key.items())), "rows": list(rows)})
    return f"step_costs_{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def load(path: Path, max_age: float, clock: Callable[[], float] = time.time) -> tuple[Table, float] | None:
    """A table at most ``max_age`` seconds old and a draft's share; None when there is none, or it is not whole."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        table = [(int(rows), float(seconds)) for rows, seconds in found["table"]]
        share, age = float(found["draft_share"]), clock() - float(found["created"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    ascending = all(a < b for (a, _), (b, _) in pairwise(table))
    if not table or not ascending or any(not 0 < seconds < float("inf") for _, seconds in table):
        return None
    return (table, share) if 0 <= age <= max_age and 0 <= share <= 1 else None


def save(
    path: Path, key: Mapping[str, str], table: Table, draft_share: float, clock: Callable[[], float] = time.time
) -> str:
    """Write a table whole or not at all: "", or why not. A directory that cannot be written to is no reason to fail."""
    text = json.dumps({"created": clock(), "key": dict(key), "table": table, "draft_share": draft_share})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)
                raise
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""
