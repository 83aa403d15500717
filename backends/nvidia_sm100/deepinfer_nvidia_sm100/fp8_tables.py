"""Measured tiles of products with FP8 weights, from the same files as :mod:`.tables`.

``fp8_plain`` and ``fp8_rounded`` map ``"NxK"`` to ``[most rows, answer]`` in ascending order. An answer is null
(widen the weight, and cuBLAS), or ``["few", ...]``, ``["many", ...]`` or ``["hopper", ...]`` with that tile's numbers.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs
import torch

from .ops.few_rows import Tile
from .ops.fp8_hopper import HopperTile
from .ops.fp8_many_rows import ManyTile
from .tables import answer_for, numbers_of, tile_of

Kind = Literal["plain", "rounded"]
Answer = Tile | ManyTile | HopperTile | None
MANY: dict[str, type[ManyTile] | type[HopperTile]] = {"many": ManyTile, "hopper": HopperTile}


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
    kind = MANY[name]
    return kind(**dict(zip((field.name for field in attrs.fields(kind)), numbers, strict=True)))


def encoded(answer: Answer) -> list[Any] | None:
    """An entry of a table."""
    if answer is None:
        return None
    if isinstance(answer, Tile):
        return ["few", *numbers_of(answer)]
    return ["hopper" if isinstance(answer, HopperTile) else "many", *attrs.astuple(answer)]
