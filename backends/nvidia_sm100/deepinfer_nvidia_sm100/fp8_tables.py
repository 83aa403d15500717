"""Measured tiles of products with FP8 weights, from the same files as :mod:`.tables`.

``fp8_plain`` and ``fp8_rounded`` map ``"NxK"`` to ``[most rows, answer]`` in ascending order. An answer is null
(widen the weight, and cuBLAS), or ``["few", ...]`` or ``["many", ...]`` with that tile's numbers.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs
import torch

from .ops.few_rows import Tile
from .ops.fp8_many_rows import ManyTile
from .tables import answer_for, numbers_of, tile_of

Kind = Literal["plain", "rounded"]
Answer = Tile | ManyTile | None
MANY_FIELDS = tuple(field.name for field in attrs.fields(ManyTile))


def fp8_tile(
    kind: Kind, device: torch.device, out_features: int, in_features: int, rows: int, own: str | None = None
) -> Answer | Literal["thumb"]:
    """The measured answer for this product; ``"thumb"`` where nothing was measured."""
    found = answer_for(f"fp8_{kind}", device, out_features, in_features, rows, own)
    return "thumb" if found == "thumb" else decoded(found)


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
