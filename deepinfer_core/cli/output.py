"""Results on standard output: rich tables on a terminal, plain columns in a pipe, JSON where asked for."""

from __future__ import annotations

import codecs
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import click


def print_json(value: Any, *, indent: int | None = 1) -> None:
    """Print ``value`` as strict JSON: numbers that JSON lacks become null, records become objects."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    escaped = not codecs.lookup(encoding).name.startswith("utf")  # other encodings lack characters that JSON can escape
    click.echo(json.dumps(plain(value), indent=indent, allow_nan=False, ensure_ascii=escaped))


def plain(value: Any) -> Any:
    """``value`` in JSON's types. Keys become strings."""
    if attrs.has(type(value)):
        value = attrs.asdict(value, recurse=False)
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, set | frozenset):
        return sorted(plain(part) for part in value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(value)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table. In a pipe: a heading and columns two spaces apart, every row on one line."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _rich_table(title, columns, cells)
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    click.echo(f"# {title}")
    for row in (columns, *cells):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _rich_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def size(num_bytes: float) -> str:
    """``1536`` -> ``"1.5 KiB"``."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    step = 0
    while abs(num_bytes) >= 1024 and step < len(units) - 1:
        num_bytes /= 1024
        step += 1
    return f"{num_bytes:.0f} B" if step == 0 else f"{num_bytes:.1f} {units[step]}"
