"""What was measured to be fastest, by architecture: one JSON file each, made by ``deepinfer tune``.

``linear`` maps ``"NxK"`` to a list of ``[most rows, tile]`` in ascending order, where tile is null for cuBLAS, or
``[block_n, block_m, block_k, splits, stages, warps]``, with ``true`` behind it where tensor descriptors are used, and
another where the next kernel is let in late. Tiles that hold the weight in registers begin with their kind:
``["one", block_n, block_k, splits, warps]`` (:class:`.one_row.OneRowTile`) and
``["held", block_n, warps, held, splits, ahead, registers]`` (:class:`.held_rows.HeldTile`). ``gated_linear`` has the
same for products that end in a gate, ``between_attention`` for all products of that region, measured among the kernels
of a layer.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch

from deepinfer_core.api import ConfigError

from . import table_file
from .ops.few_rows import AnyTile, Tile
from .ops.held_rows import HeldTile
from .ops.one_row import OneRowTile

FOLDER = Path(__file__).with_name("tuned")
TILE_FIELDS = ("block_n", "block_m", "block_k", "splits", "stages", "warps")
TILE_FLAGS = ("described", "late")
ONE_ROW_FIELDS = ("block_n", "block_k", "splits", "warps")
HELD_FIELDS = ("block_n", "warps", "held", "splits", "ahead", "registers")


def architecture(device: torch.device) -> str:
    """``"sm_90"``, or ``"none"`` off the GPU."""
    if device.type != "cuda":
        return "none"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def tile_of(numbers: list[Any]) -> Tile:
    """A tile as a table has it."""
    sizes, flags = numbers[: len(TILE_FIELDS)], numbers[len(TILE_FIELDS) :]
    return Tile(**dict(zip(TILE_FIELDS, sizes, strict=True)), **dict(zip(TILE_FLAGS, flags, strict=False)))


def numbers_of(tile: AnyTile) -> list[Any]:
    """The other way."""
    if isinstance(tile, OneRowTile):
        return ["one", *(getattr(tile, field) for field in ONE_ROW_FIELDS)]
    if isinstance(tile, HeldTile):
        return ["held", *(getattr(tile, field) for field in HELD_FIELDS)]
    flags = [getattr(tile, flag) for flag in TILE_FLAGS]
    while flags and not flags[-1]:
        flags.pop()
    return [getattr(tile, field) for field in TILE_FIELDS] + flags


def any_tile_of(numbers: list[Any]) -> AnyTile:
    """The same, of any kind."""
    if numbers[0] == "one":
        return OneRowTile(**dict(zip(ONE_ROW_FIELDS, numbers[1:], strict=True)))
    if numbers[0] == "held":
        return HeldTile(**dict(zip(HELD_FIELDS, numbers[1:], strict=True)))
    return tile_of(numbers)


@functools.cache
def measured(arch: str, own: str | None = None, section: str = "linear") -> dict[str, Any]:
    """Shape -> rows and answers: the package's, and over them those of a user's own file, which may lack the section.

    Raises:
        ConfigError: the file cannot be read, is no such table, or has a tile that cannot be.
    """
    path = FOLDER / f"{arch}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")).get(section, {}) if path.exists() else {}
    if own is not None:
        try:
            found = found | table_file.read(own).get(section, {})
        except table_file.BadTable as error:
            raise ConfigError(f"plugins.nvidia_sm100.table={own!r}: {error}") from error
    return found


def answer_for(
    section: str, device: torch.device, out_features: int, in_features: int, rows: int, own: str | None = None
) -> Any:
    """A section's entry for this product, as it lies there; ``"thumb"`` where nothing was measured."""
    for most, answer in measured(architecture(device), own, section).get(f"{out_features}x{in_features}", ()):
        if rows <= most:
            return answer
    return "thumb"


def linear_tile(
    device: torch.device,
    out_features: int,
    in_features: int,
    rows: int,
    own: str | None = None,
    section: str = "linear",
) -> AnyTile | Literal["thumb"] | None:
    """The tile for this product; None where cuBLAS was faster; ``"thumb"`` where nothing was measured."""
    found = answer_for(section, device, out_features, in_features, rows, own)
    return any_tile_of(found) if isinstance(found, list) else found


def joined(answers: Iterable[tuple[int, Any]]) -> list[list[Any]]:
    """Entries of a shape, ``[most rows, answer]`` ascending: neighbours of equal answer are one."""
    made: list[list[Any]] = []
    for rows, answer in sorted(answers, key=lambda item: item[0]):
        if made and made[-1][1] == answer:
            made[-1][0] = rows
        else:
            made.append([rows, answer])
    return made
