"""Reading the small JSON files of a checkpoint, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deepinfer_core.api import CheckpointError

from .damage import remedy


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``. Raises CheckpointError if it is unreadable, not JSON or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}); {remedy(path)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_optional_json_object(path: Path) -> dict[str, Any]:
    """Like :func:`read_json_object`, ``{}`` when there is no such file."""
    return read_json_object(path) if path.is_file() else {}
