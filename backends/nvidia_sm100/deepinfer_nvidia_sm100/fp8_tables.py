"""Measured tiles of products with FP8 weights, from the same files as :mod:`.tables`.

``fp8_plain`` and ``fp8_rounded`` map ``"NxK"`` to ``[most rows, answer]`` in ascending order. An answer is null
(widen the weight, and cuBLAS), or ``["few", ...]`` or ``["many", ...]`` with that tile's numbers.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, Literal

import attrs
import torch

from deepinfer_core.api import ConfigError

from .ops.few_rows import Tile
from .ops.fp8_many_rows import ManyTile
from .tables import FOLDER, architecture, numbers_of, tile_of

Kind = Literal["plain", "rounded"]
Answer = Tile | ManyTile | None
MANY_FIELDS = tuple(field.name for field in attrs.fields(ManyTile))


@functools.cache
def fp8_table(arch: str, kind: Kind, own: str | None = None) -> dict[str, Any]:
    """Shape -> rows and answers: the package's, and over them those of a user's own file.

    Raises:
        ConfigError: the file cannot be read, or is no such table.
    """
    path = FOLDER / f"{arch}.json"
    found: dict[str, Any] = {}
    if path.exists():
        found |= json.loads(path.read_text(encoding="utf-8")).get(f"fp8_{kind}", {})
    if own is not None:
        try:
            found |= json.loads(Path(own).read_text(encoding="utf-8")).get(f"fp8_{kind}", {})
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"plugins.nvidia_sm100.table={own!r}: {type(error).__name__}: {error}; make one with: deepinfer tune"
            ) from error
    return found


def fp8_tile(
    kind: Kind, device: torch.device, out_features: int, in_features: int, rows: int, own: str | None = None
) -> Answer | Literal["thumb"]:
    """The measured answer for this product; ``"thumb"`` where nothing was measured."""
    for most, answer in fp8_table(architecture(device), kind, own).get(f"{out_features}x{in_features}", ()):
        if rows <= most:
            return decoded(answer)
    return "thumb"


def decoded(answer: list[Any] | None) -> Answer:
    """What a table's entry says."""
    if answer is None:
        return None
    name, *numbers = answer
    if name == "few":
        return tile_of(numbers)
    return ManyTile(**dict(zip(MANY_FIELDS, numbers, strict=True)))


def encoded(answer: Answer) -> list[Any] | None:
    """An entry of a table."""
    if answer is None:
        return None
    return ["many", *attrs.astuple(answer)] if isinstance(answer, ManyTile) else ["few", *numbers_of(answer)]
