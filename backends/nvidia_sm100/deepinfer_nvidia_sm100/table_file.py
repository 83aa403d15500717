"""A file of tuned tiles, read and checked without torch, so that a bad one is an error before anything is loaded.

Sections, shapes and answers are as :mod:`.tables` and :mod:`.fp8_tables` say.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SHARED_BYTES = 227 * 1024
"""Of a multiprocessor, for one program, on the chips that are served."""
WARPS = (1, 2, 4, 8, 16)
MOST_ROWS = {"one": 1, "held": 16}
"""Of a step, where the weight goes straight to registers, without the matrix unit or with it."""
MAKE = "make one with: deepinfer tune"


class BadTable(ValueError):
    """What is wrong with a table, and where in it."""


@functools.cache
def read(path: str) -> dict[str, dict[str, list[list[Any]]]]:
    """A checked table: section -> ``"NxK"`` -> ``[most rows, answer]`` in ascending order.

    Raises:
        BadTable: the file cannot be read, or holds something else.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadTable(f"cannot be read: {error.strerror}; {MAKE}") from error
    except ValueError as error:
        raise BadTable(f"no JSON: {error}; {MAKE}") from error
    if not isinstance(found, dict) or "linear" not in found:
        raise BadTable(f"no table of tiles, which has a section 'linear'; {MAKE}")
    for section, shapes in found.items():
        if section not in CHECKS:
            raise BadTable(f"section {section!r}: expected one of {', '.join(CHECKS)}; {MAKE}")
        if not isinstance(shapes, dict):
            raise BadTable(f"section {section!r}: expected shapes; {MAKE}")
        for shape, entries in shapes.items():
            _check_shape(section, shape, entries)
    return found


def _check_shape(section: str, shape: str, entries: Any) -> None:
    where = f"{section} {shape!r}"
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", shape):
        raise BadTable(f"{where}: expected a shape such as '6144x2560'; {MAKE}")
    if not isinstance(entries, list) or not all(isinstance(entry, list) and len(entry) == 2 for entry in entries):
        raise BadTable(f"{where}: expected a list of [most rows, tile]; {MAKE}")
    before = 0
    for most, answer in entries:
        if not _number(most) or most <= before:
            raise BadTable(f"{where}: most rows {most!r}: expected whole numbers in ascending order; {MAKE}")
        before = most
        problem = None if answer is None else _problem(section, answer)
        if answer and not problem and most > MOST_ROWS.get(answer[0], most):
            problem = f"such tiles are for {MOST_ROWS[answer[0]]} rows at most"
        if problem:
            raise BadTable(f"{where}, up to {most} rows: {json.dumps(answer)}: {problem}; run deepinfer tune again")


def _problem(section: str, answer: Any) -> str | None:
    return CHECKS[section](answer) if isinstance(answer, list) else "expected a list of numbers, or null"


def _number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _power(name: str, value: Any, least: int, most: int) -> str | None:
    if _number(value) and least <= value <= most and value & (value - 1) == 0:
        return None
    return f"{name} {value!r}: expected a power of two from {least} to {most}"


def _at_least(name: str, value: Any, least: int) -> str | None:
    return None if _number(value) and value >= least else f"{name} {value!r}: expected a number from {least} on"


def _shared(needed: int) -> str | None:
    if needed <= SHARED_BYTES:
        return None
    return f"needs {needed:,} bytes of shared memory, and a multiprocessor has {SHARED_BYTES:,}"


def _first(*problems: str | None) -> str | None:
    return next((problem for problem in problems if problem), None)


def _tile(numbers: Sequence[Any], weight_bytes: int, row_bytes: int) -> str | None:
    """``[block_n, block_m, block_k, splits, stages, warps]``, and up to two flags, as :class:`.few_rows.Tile` says."""
    if not 6 <= len(numbers) <= 8 or not all(isinstance(flag, bool) for flag in numbers[6:]):
        return "expected [block_n, block_m, block_k, splits, stages, warps], and perhaps true or false, twice at most"
    block_n, block_m, block_k, splits, stages, warps = numbers[:6]
    wrong = _first(
        _power("block_n", block_n, 16, 256),
        _power("block_m", block_m, 16, 256),
        _power("block_k", block_k, 16, 1024),
        _at_least("splits", splits, 1),
        _at_least("stages", stages, 1),
        None if warps in WARPS else f"warps {warps!r}: expected one of {', '.join(map(str, WARPS))}",
    )
    return wrong or _shared(block_k * (weight_bytes * block_n + row_bytes * block_m) * stages)


def _one(numbers: Sequence[Any]) -> str | None:
    """``["one", block_n, block_k, splits, warps]``, as :class:`.one_row.OneRowTile` says."""
    if len(numbers) != 5:
        return 'expected ["one", block_n, block_k, splits, warps]'
    block_n, block_k, splits, warps = numbers[1:]
    return _first(
        _power("block_n", block_n, 2, 16),
        _power("block_k", block_k, 64, 4096),
        _at_least("splits", splits, 1),
        None if warps in WARPS else f"warps {warps!r}: expected one of {', '.join(map(str, WARPS))}",
    )


def _held(numbers: Sequence[Any]) -> str | None:
    """``["held", block_n, warps, held, splits, ahead, registers]``, as :class:`.held_rows.HeldTile` says."""
    if len(numbers) != 7:
        return 'expected ["held", block_n, warps, held, splits, ahead, registers]'
    block_n, warps, held, splits, ahead, registers = numbers[1:]
    return _first(
        _power("block_n", block_n, 8, 16),
        None if warps in WARPS else f"warps {warps!r}: expected one of {', '.join(map(str, WARPS))}",
        _at_least("held", held, 1),
        _at_least("splits", splits, 1),
        _at_least("ahead", ahead, 1),
        None
        if registers == 0 or (_number(registers) and 24 <= registers <= 255)
        else f"registers {registers!r}: expected 24 to 255, or 0 for as many as the compiler takes",
    )


def _plain(numbers: Sequence[Any]) -> str | None:
    return IN_REGISTERS.get(str(numbers[0]) if numbers else "", _fixed)(numbers)


def _fixed(numbers: Sequence[Any]) -> str | None:
    return _tile(numbers, 2, 2)


def _gated(numbers: Sequence[Any]) -> str | None:
    return IN_REGISTERS.get(str(numbers[0]) if numbers else "", _fixed_gated)(numbers)


def _fixed_gated(numbers: Sequence[Any]) -> str | None:
    wrong = _fixed(numbers)
    if wrong is None and any(numbers[6:7]) and (numbers[3] != 1 or numbers[0] < 128):
        return "tensor descriptors end in a gate by one part and 128 columns or more"
    return wrong


def _fp8(row_bytes: int) -> Callable[[Sequence[Any]], str | None]:
    def check(answer: Sequence[Any]) -> str | None:
        name, *numbers = answer if answer else [None]
        if name == "few":
            return _tile(numbers, 1, row_bytes)
        if row_bytes == 2 or name not in ("many", "hopper"):
            kinds = "'few'" if row_bytes == 2 else "'few', 'many' or 'hopper'"
            return f"{name!r}: expected {kinds} and its numbers"
        return _many(numbers) if name == "many" else _hopper(numbers)

    return check


def _many(numbers: Sequence[Any]) -> str | None:
    if len(numbers) != 9:
        return "expected [block_m, block_n, halves, stages, warps, together, each, box, prefetch]"
    block_m, block_n, halves, stages, warps, together, each = numbers[:7]
    wrong = _first(
        _power("block_m", block_m, 16, 256),
        _power("block_n", block_n, 16, 128),
        _power("halves", halves, 1, 2),
        _at_least("stages", stages, 1),
        None if warps in WARPS else f"warps {warps!r}: expected one of {', '.join(map(str, WARPS))}",
        _at_least("together", together, 1),
        _at_least("each", each, 0),
    )
    return wrong or _shared(128 * (block_m + block_n * halves) * stages)


def _hopper(numbers: Sequence[Any]) -> str | None:
    if len(numbers) != 5:
        return "expected [block_m, block_n, stages, together, box]"
    block_m, block_n, stages, together, box = numbers
    wrong = _first(
        None if block_m in (128, 192, 256) else f"block_m {block_m!r}: expected 128, 192 or 256",
        _power("block_n", block_n, 64, 128),
        _at_least("stages", stages, 1),
        _at_least("together", together, 1),
    )
    groups = 3 if block_m == 192 else 2
    return wrong or _shared(128 * (block_m + block_n) * stages + (2 * groups * 64 * block_n if box else 0))


IN_REGISTERS: dict[str, Callable[[Sequence[Any]], str | None]] = {"one": _one, "held": _held}
"""Kinds of tiles whose answer begins with their name."""
CHECKS: dict[str, Callable[[Sequence[Any]], str | None]] = {
    "linear": _plain,
    "gated_linear": _gated,
    "between_attention": _plain,
    "fixed_linear": _fixed,
    "fixed_gated_linear": _fixed_gated,
    "fp8_plain": _fp8(2),
    "fp8_rounded": _fp8(1),
}
"""Sections, and what is wrong with an answer of theirs."""
