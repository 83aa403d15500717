"""Recorded traces: what arrived and what each step did, as JSON lines, for replay and simulation.

The first line is a :class:`TraceHeader`; every other line is an :class:`Arrival`, a :class:`TraceStep` or a
:class:`Finish`, in the order in which they became known, with ``"type"`` saying which. Times are seconds since the
recording began. No token is stored, and no hash of one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import attrs

from deepinfer_core.api import ConfigError
from deepinfer_core.config.accept import NotAccepted, accept, describe_type

from .outputs import FinishReason

FORMAT: Final = "deepinfer-trace"
VERSION = 1


def _least(minimum: float) -> Any:
    return attrs.field(validator=attrs.validators.ge(minimum))


@attrs.frozen(kw_only=True)
class TraceHeader:
    """What recorded the trace.

    Attributes:
        block_size: tokens of a block in :attr:`Arrival.blocks`. max_batch_tokens, max_running: limits of a step.
        num_blocks: cache group -> blocks. model: architecture. policy: ``plugin:name``.
    """

    format: Literal["deepinfer-trace"] = FORMAT
    version: int = VERSION
    block_size: int = _least(1)
    max_batch_tokens: int = _least(1)
    max_running: int = _least(1)
    num_blocks: Mapping[str, int] = attrs.field(factory=dict)
    model: str = ""
    policy: str = ""


@attrs.frozen(kw_only=True)
class Arrival:
    """A request came.

    Attributes:
        prompt: tokens. max_tokens: of output, at most. n: completions.
        blocks: a number for every full block of the prompt. Two prompts share the number at a place if and only if
            they agree on every token up to the end of that block (and on cache salt), so a prefix cache that holds
            the one holds the other.
        temperature, top_p, top_k, seeded, stops: how it is sampled; stops counts strings and ids besides EOS.
        deadline: seconds, on the trace's clock. ttft_target, tpot_target: seconds.
    """

    time: float
    id: str
    prompt: int = _least(1)
    max_tokens: int = _least(1)
    n: int = _least(1)
    blocks: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seeded: bool = False
    stops: int = 0
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    ttft_target: float | None = None
    tpot_target: float | None = None


@attrs.frozen(kw_only=True)
class TraceStep:
    """A step's result was known at ``time``.

    Attributes:
        tokens: rows, ``prefill`` of them of prompts. requests: how many had rows. output: tokens produced.
        seconds: from when it could start (the result of the step before it at the earliest) to its result.
    """

    time: float
    tokens: int = _least(1)
    prefill: int = _least(0)
    requests: int = _least(1)
    output: int = _least(0)
    seconds: float = _least(0)


@attrs.frozen(kw_only=True)
class Finish:
    """A completion ended, with ``output`` tokens."""

    time: float
    id: str
    child: int = _least(0)
    output: int = _least(0)
    reason: FinishReason


TraceRecord = TraceHeader | Arrival | TraceStep | Finish
_TYPES: Mapping[str, type[TraceRecord]] = {
    "header": TraceHeader,
    "arrival": Arrival,
    "step": TraceStep,
    "finish": Finish,
}
_NAMES = {kind: name for name, kind in _TYPES.items()}


@attrs.frozen(kw_only=True)
class Trace:
    """A trace as read. Arrivals are in order of time; ``steps_before``: of each, the steps that had ended by then."""

    header: TraceHeader
    arrivals: tuple[Arrival, ...]
    steps: tuple[TraceStep, ...]
    finishes: tuple[Finish, ...]
    steps_before: tuple[int, ...] = ()

    def output_lengths(self) -> dict[str, int]:
        """Request id -> tokens of its longest completion, of those that ended."""
        lengths: dict[str, int] = {}
        for finish in self.finishes:
            lengths[finish.id] = max(lengths.get(finish.id, 0), finish.output)
        return lengths


def write_record(record: TraceRecord) -> str:
    """One line, with its line break."""
    return json.dumps({"type": _NAMES[type(record)], **attrs.asdict(record)}, allow_nan=False) + "\n"


def read_trace(path: str | Path) -> Trace:
    """Read and check a trace.

    Raises:
        ConfigError: the file cannot be read, or a line is no record of this format; names file, line and field.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"trace {path}: {reason}") from None
    records = [_read_line(line, f"{path}:{number}", number) for number, line in _lines(text)]
    if not records:
        raise ConfigError(f"trace {path}: is empty; expected a header line")
    header, arrivals = records[0], sorted(_arrivals(records), key=lambda arrival: arrival[0].time)
    assert isinstance(header, TraceHeader)
    _check_blocks(header, (arrival for arrival, _ in arrivals), path)
    return Trace(
        header=header,
        arrivals=tuple(arrival for arrival, _ in arrivals),
        steps=tuple(r for r in records if isinstance(r, TraceStep)),
        finishes=tuple(r for r in records if isinstance(r, Finish)),
        steps_before=tuple(steps for _, steps in arrivals),
    )


def _arrivals(records: Iterable[TraceRecord]) -> Iterator[tuple[Arrival, int]]:
    steps = 0
    for record in records:
        steps += isinstance(record, TraceStep)
        if isinstance(record, Arrival):
            yield record, steps


def _lines(text: str) -> Iterable[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def _read_line(line: str, place: str, number: int) -> TraceRecord:
    try:
        data = json.loads(line)
    except ValueError:
        raise ConfigError(f"trace {place}: not JSON; was the recording cut off here?") from None
    if not isinstance(data, dict):
        raise ConfigError(f"trace {place}: expected a JSON object")
    name = data.pop("type", None)
    if (name == "header") != (number == 1):
        expected = "the first line to be the header" if number == 1 else "one header, in the first line"
        raise ConfigError(f"trace {place}: type={name!r}: expected {expected}")
    if name == "header":
        found = (data.get("format"), data.get("version"))
        if found != (FORMAT, VERSION):
            raise ConfigError(
                f"trace {place}: format={found[0]!r} version={found[1]!r}: expected {FORMAT!r} version {VERSION}"
            )
    if name not in _TYPES:
        raise ConfigError(f"trace {place}: type={name!r}: expected one of {', '.join(_TYPES)}")
    return _record(_TYPES[name], data, place)


def _record(kind: type[TraceRecord], data: Mapping[str, Any], place: str) -> TraceRecord:
    fields = attrs.fields_dict(attrs.resolve_types(kind))
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise ConfigError(f"trace {place}: unknown field {unknown[0]!r}; expected {', '.join(fields)}")
    values = {}
    for name, field in fields.items():
        if name not in data:
            if field.default is attrs.NOTHING:
                raise ConfigError(f"trace {place}: {name} is missing")
            continue
        try:
            values[name] = accept(data[name], field.type)
        except NotAccepted:
            expected = describe_type(field.type)
            raise ConfigError(f"trace {place}: {name}={data[name]!r}: expected {expected}") from None
    try:
        return kind(**values)
    except ValueError as error:
        raise ConfigError(f"trace {place}: {error}") from None


def _check_blocks(header: TraceHeader, arrivals: Iterable[Arrival], path: str | Path) -> None:
    for arrival in arrivals:
        if len(arrival.blocks) > arrival.prompt // header.block_size:
            raise ConfigError(
                f"trace {path}: arrival {arrival.id!r} has {len(arrival.blocks)} blocks for prompt={arrival.prompt}: "
                f"expected at most {arrival.prompt // header.block_size} of {header.block_size} tokens"
            )
