"""Puts a question to a child process and survives whatever the child does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import attrs

MODULE = "deepinfer_core.doctor.child"


@attrs.frozen(kw_only=True)
class Answer:
    """What a child said. ``facts`` is empty when it did not come to an end; ``trouble`` then says how it ended, and
    ``stage`` what it was doing."""

    facts: Mapping[str, Any]
    stage: str = ""
    trouble: str = ""


def ask(question: Mapping[str, Any], *, timeout: float, environ: Mapping[str, str]) -> Answer:
    """Run the child with a question. ``timeout`` in seconds; the child and its children are ended after that."""
    child = subprocess.Popen(
        [sys.executable, "-m", MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        start_new_session=True,
    )
    try:
        said, complaints = child.communicate(json.dumps(question), timeout=timeout)
    except subprocess.TimeoutExpired:
        _end(child)
        said, _ = child.communicate()
        return Answer(facts={}, stage=_last_stage(said), trouble=f"no answer within {timeout:g} s")
    if child.returncode == 0 and (facts := _facts(said)) is not None:
        return Answer(facts=facts)
    return Answer(facts={}, stage=_last_stage(said), trouble=_how_it_ended(child.returncode, complaints))


def _end(child: subprocess.Popen[str]) -> None:
    """End the child's whole session: a probe may have started a process of its own."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        child.kill()


def _lines(said: str) -> list[dict[str, Any]]:
    """The child's messages; a line cut short by its end is none."""
    found = []
    for line in (said or "").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _last_stage(said: str) -> str:
    stages = [line["stage"] for line in _lines(said) if "stage" in line]
    return stages[-1] if stages else "start"


def _facts(said: str) -> dict[str, Any] | None:
    found: list[dict[str, Any]] = [line["facts"] for line in _lines(said) if "facts" in line]
    return found[-1] if found else None


def _how_it_ended(code: int, complaints: str) -> str:
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    lines = complaints.strip().splitlines()
    return f"ended with exit code {code}" + (f": {lines[-1]}" if lines else "")
