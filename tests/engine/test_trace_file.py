"""The trace's format: written and read back unchanged, and every damage named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer_core.api import ConfigError
from deepinfer_core.engine.trace_file import (
    Arrival,
    Finish,
    TraceHeader,
    TraceRecord,
    TraceStep,
    read_trace,
    write_record,
)

HEADER = TraceHeader(
    block_size=4, max_batch_tokens=64, max_running=8, num_blocks={"full": 9, "window": 5}, model="M", policy="p:q"
)
ARRIVAL = Arrival(time=0.5, id="a", prompt=9, max_tokens=3, n=2, blocks=(0, 1), tenant="t", deadline=4.0)
STEP = TraceStep(time=0.75, tokens=9, prefill=9, requests=1, output=1, seconds=0.25)
FINISH = Finish(time=1.0, id="a", child=0, output=3, reason="length")


def write(path: Path, *records: TraceRecord) -> Path:
    path.write_text("".join(map(write_record, records)), encoding="utf-8")
    return path


def damaged(path: Path, record: TraceRecord, **fields: Any) -> Path:
    """A trace whose second line is ``record`` with changed fields; ... removes one."""
    data = {**json.loads(write_record(record)), **fields}
    line = json.dumps({name: value for name, value in data.items() if value is not ...})
    path.write_text(write_record(HEADER) + line + "\n", encoding="utf-8")
    return path


def test_a_trace_comes_back_unchanged(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t", HEADER, ARRIVAL, STEP, FINISH))
    assert trace.header == HEADER
    assert (trace.arrivals, trace.steps, trace.finishes) == ((ARRIVAL,), (STEP,), (FINISH,))


times = st.floats(0, 1e9, allow_nan=False)
arrivals = st.builds(
    Arrival,
    time=times,
    id=st.text(max_size=8),
    prompt=st.integers(40, 10**6),
    max_tokens=st.integers(1, 10**6),
    n=st.integers(1, 64),
    blocks=st.lists(st.integers(0, 10**9), max_size=10).map(tuple),
    temperature=st.floats(0, 5),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 100),
    seeded=st.booleans(),
    stops=st.integers(0, 9),
    priority=st.integers(-9, 9),
    tenant=st.text(max_size=8),
    deadline=st.none() | times,
    ttft_target=st.none() | times,
    tpot_target=st.none() | times,
)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(arrivals, max_size=4))
def test_any_arrival_comes_back(tmp_path: Path, records: list[Arrival]) -> None:
    trace = read_trace(write(tmp_path / "t", HEADER, *records))
    assert list(trace.arrivals) == sorted(records, key=lambda a: a.time)


def test_optional_fields_may_be_left_out(tmp_path: Path) -> None:
    path = damaged(tmp_path / "t", ARRIVAL, tenant=..., deadline=..., blocks=...)
    assert read_trace(path).arrivals == (attrs.evolve(ARRIVAL, tenant="", deadline=None, blocks=()),)


def test_output_lengths_are_those_of_the_longest_completions(tmp_path: Path) -> None:
    finishes = [attrs.evolve(FINISH, child=i, output=output) for i, output in enumerate((3, 8, 5))]
    other = attrs.evolve(FINISH, id="b", output=0, reason="abort")
    trace = read_trace(write(tmp_path / "t", HEADER, *finishes, other))
    assert trace.output_lengths() == {"a": 8, "b": 0}


@pytest.mark.parametrize(
    ("record", "fields", "said"),
    [
        (ARRIVAL, {"prompt": "9"}, "prompt='9': expected an integer"),
        (ARRIVAL, {"prompt": True}, "prompt=True: expected an integer"),
        (ARRIVAL, {"prompt": 0}, "'prompt' must be >= 1: 0"),
        (ARRIVAL, {"prompt": ...}, "prompt is missing"),
        (ARRIVAL, {"promt": 3}, "unknown field 'promt'"),
        (ARRIVAL, {"blocks": [0, "x"]}, "blocks=.*: expected a list of integers"),
        (ARRIVAL, {"time": float("nan")}, "time=nan: expected a finite number"),
        (STEP, {"seconds": -1}, "'seconds' must be >= 0"),
        (STEP, {"tokens": 2.5}, "tokens=2.5: expected an integer"),
        (FINISH, {"reason": "boredom"}, "reason='boredom': expected 'stop' or 'length' or"),
        (FINISH, {"id": 7}, "id=7: expected a string"),
        (FINISH, {"type": "ending"}, "type='ending': expected one of header, arrival, step, finish"),
        (FINISH, {"type": ...}, "type=None"),
        (HEADER, {}, "type='header': expected one header, in the first line"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(
    tmp_path: Path, record: TraceRecord, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=rf"trace .*/t:2: {said}"):
        read_trace(damaged(tmp_path / "t", record, **fields))


def test_more_blocks_than_the_prompt_fills(tmp_path: Path) -> None:
    path = write(tmp_path / "t", HEADER, attrs.evolve(ARRIVAL, prompt=7))
    with pytest.raises(ConfigError, match="arrival 'a' has 2 blocks for prompt=7: expected at most 1 of 4 tokens"):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty; expected a header line"),
        ("\n\n", "is empty"),
        (write_record(ARRIVAL), ":1: type='arrival': expected the first line to be the header"),
        (write_record(HEADER) + '{"type": "arri', ":2: not JSON; was the recording cut off here"),
        (write_record(HEADER) + "[1]\n", ":2: expected a JSON object"),
        ('{"type": "header", "format": "other", "version": 1}', ":1: format='other' version=1: expected"),
        ('{"type": "header", "format": "deepinfer-trace", "version": 2}', "expected 'deepinfer-trace' version 1"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_trace(tmp_path / "t")
    assert said in str(caught.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="trace /no/such/trace: No such file"):
        read_trace("/no/such/trace")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        read_trace(tmp_path / "t")
