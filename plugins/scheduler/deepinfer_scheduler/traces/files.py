"""Trace files: what ``--record-trace`` writes, and the layouts of three public collections.

| layout | kind | fields |
|---|---|---|
| recorded | JSON lines, the first one a header | see docs/observability.md |
| Mooncake | JSON lines | ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` (optional) |
| Azure | CSV | ``TIMESTAMP`` (date and time), ``ContextTokens``, ``GeneratedTokens`` |
| BurstGPT | CSV | ``Timestamp`` (s), ``Request tokens``, ``Response tokens``; ``Model`` becomes the tenant |

The last three may have ``tenant``, ``priority``, ``ttft_target_ms``, ``tpot_target_ms`` and ``deadline_ms`` besides.
They are read line by line, so that a trace of millions takes no memory.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import attrs

from deepinfer_core.api import ConfigError
from deepinfer_core.api.simulation import SimulatedRequest, SimulationConfig, read_recorded

from .blocks import engine_blocks

Row = Mapping[str, Any]


@attrs.frozen(kw_only=True)
class Source:
    """Requests that can be read again for every policy. ``limits`` are those of the engine that recorded them."""

    name: str
    requests: Callable[[SimulationConfig], Iterator[SimulatedRequest]]
    limits: SimulationConfig | None = None


def open_trace(path: str | Path, *, id_tokens: int = 512) -> Source:
    """A trace file of any of the layouts; which one, its first line says.

    Args:
        id_tokens: tokens that one of ``hash_ids`` stands for.

    Raises:
        ConfigError: it cannot be read, or is of none of the layouts.
    """
    place = Path(path)
    first = next(iter(_lines(place)), "").strip()
    if first.startswith("{"):
        row = _json(first, f"{path}:1")
        if row.get("type") == "header":
            return _recorded(place)
        if "input_length" in row:
            return _stream(place, lambda config: _mooncake(place, config, id_tokens))
    else:
        columns = next(csv.reader([first]), [])
        for wanted, read in ((_AZURE, _azure), (_BURST, _burst)):
            if set(wanted) <= set(columns):
                return _stream(place, lambda _, read=read: read(place))  # type: ignore[misc]
    raise ConfigError(
        f"trace {path}: starts with {first[:60]!r}: expected a recorded trace, JSON lines with input_length, "
        f"or CSV with the columns {', '.join(_AZURE)} or {', '.join(_BURST)}"
    )


def _stream(path: Path, read: Callable[[SimulationConfig], Iterator[SimulatedRequest]]) -> Source:
    return Source(name=path.name, requests=lambda config: _ascending(read(config), path))


def _recorded(path: Path) -> Source:
    trace = read_recorded(path)

    def requests(config: SimulationConfig) -> Iterator[SimulatedRequest]:
        size = trace.config.block_size
        for request in sorted(trace.requests, key=lambda request: request.arrival):
            blocks = engine_blocks(request.blocks, request.prompt, size, config.block_size)
            yield attrs.evolve(request, blocks=blocks)

    return Source(name=path.name, requests=requests, limits=trace.config)


# ---- Mooncake


def _mooncake(path: Path, config: SimulationConfig, id_tokens: int) -> Iterator[SimulatedRequest]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        place = f"trace {path}:{number}"
        row = _json(line, place)
        prompt = _whole(row, "input_length", place)
        ids = row.get("hash_ids") or ()
        if not isinstance(ids, list | tuple) or not all(type(i) is int and i >= 0 for i in ids):
            raise ConfigError(f"{place}: hash_ids={ids!r:.60}: expected a list of whole numbers >= 0")
        yield _request(
            number,
            _number(row, "timestamp", place) / 1000,
            prompt,
            _whole(row, "output_length", place),
            row,
            place,
            blocks=engine_blocks(ids, prompt, id_tokens, config.block_size) if ids else (),
        )


# ---- CSV

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURST = ("Timestamp", "Request tokens", "Response tokens")


def _azure(path: Path) -> Iterator[SimulatedRequest]:
    start: datetime | None = None
    for number, row, place in _rows(path):
        when = _moment(row["TIMESTAMP"], place)
        start = start or when
        seconds = (when - start).total_seconds()
        prompt, output = (_whole(row, name, place) for name in _AZURE[1:])
        yield _request(number, seconds, prompt, output, row, place)


def _burst(path: Path) -> Iterator[SimulatedRequest]:
    """Rows of zero tokens are requests that failed; they are left out."""
    for number, row, place in _rows(path):
        prompt, output = (_whole(row, name, place, least=0) for name in _BURST[1:])
        if prompt and output:
            tenant = row.get("tenant") or row.get("Model") or ""
            yield _request(number, _number(row, "Timestamp", place), prompt, output, {**row, "tenant": tenant}, place)


def _rows(path: Path) -> Iterator[tuple[int, Row, str]]:
    for number, row in enumerate(csv.DictReader(_lines(path)), 2):
        yield number, row, f"trace {path}:{number}"


def _moment(text: str | None, place: str) -> datetime:
    """The collection has seven digits of a second; Python keeps six."""
    try:
        return datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", str(text)))
    except ValueError:
        raise ConfigError(f"{place}: TIMESTAMP={text!r}: expected a date and time, as 2023-11-16 18:17:03.97") from None


# ---- fields


def _request(
    number: int, arrival: float, prompt: int, output: int, row: Row, place: str, blocks: Iterable[int] = ()
) -> SimulatedRequest:
    deadline = _optional(row, "deadline_ms", place)
    return SimulatedRequest(
        id=str(number),
        arrival=arrival,
        prompt=prompt,
        outputs=(output,),
        blocks=tuple(blocks),
        tenant=str(row.get("tenant") or ""),
        priority=int(_number(row, "priority", place)) if row.get("priority") not in (None, "") else 0,
        deadline=None if deadline is None else arrival + deadline,
        ttft_target=_optional(row, "ttft_target_ms", place),
        tpot_target=_optional(row, "tpot_target_ms", place),
    )


def _optional(row: Row, name: str, place: str) -> float | None:
    """Milliseconds as seconds."""
    return None if row.get(name) in (None, "") else _number(row, name, place) / 1000


def _number(row: Row, name: str, place: str) -> float:
    value = row.get(name)
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = float("nan")
    if isinstance(value, bool) or not abs(number) < float("inf"):
        raise ConfigError(f"{place}: {name}={value!r}: expected a number")
    return number


def _whole(row: Row, name: str, place: str, least: int = 1) -> int:
    number = _number(row, name, place)
    if number != int(number) or number < least:
        raise ConfigError(f"{place}: {name}={row.get(name)!r}: expected a whole number >= {least}")
    return int(number)


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from file
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"trace {path}: {reason}") from None


def _json(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: expected a JSON object")
    return row


def _ascending(requests: Iterator[SimulatedRequest], path: Path) -> Iterator[SimulatedRequest]:
    last = float("-inf")
    for request in requests:
        if request.arrival < last:
            raise ConfigError(
                f"trace {path}:{request.id}: arrives {last - request.arrival:g} s before the line above; sort the file"
            )
        last = request.arrival
        yield request
