"""The kit in several processes at once: on a device whose kernels are compiled, compiling is most of its time.

Each process opens the backend for itself and asks the cases it is given. Cases of one operator in one dtype share
kernels and those of one model its answers, so they stay together; drawn requests share nothing and are spread.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import attrs

from deepinfer_core.api import DeviceError

from .case import Case, Tier
from .gaps import Gap
from .report import Result

OPENING = 300.0
"""Seconds until a process must have opened the backend."""


@attrs.frozen(kw_only=True)
class Asked:
    """What every process needs to know to ask the same cases: the arguments of :func:`.kit.run`."""

    backend: str
    tier: Tier
    families: tuple[str, ...]
    gaps: tuple[Gap, ...]
    plugins: tuple[str, ...]
    providers: tuple[str, ...]
    demands: tuple[str, ...]


@attrs.define(kw_only=True, eq=False)
class _Process:
    """``left``: names of the cases it was given and has not answered."""

    process: Any
    connection: Connection
    left: deque[str]
    opened: bool = False


def together(cases: Sequence[Case]) -> list[list[str]]:
    """Names of cases that one process asks one after the other; what takes longest comes first."""
    groups: dict[str, list[str]] = {}
    for case in cases:
        name = case.id if "/drawn" in case.id else case.id.rpartition("/")[0]
        groups.setdefault(case.operator if case.family in ("hygiene", "moe_communication") else name, []).append(
            case.id
        )
    return sorted(
        groups.values(), key=lambda names: (not names[0].startswith("model"), "/drawn_widely" not in names[0])
    )


def ask_side_by_side(
    asked: Asked, cases: Sequence[Case], jobs: int, progress: Callable[[Result, int, int], None] | None = None
) -> list[Result]:
    """The results of ``cases``, in their order, from up to ``jobs`` processes.

    A process that ends in a case fails it, and another one goes on.

    Raises:
        DeviceError: a process could not open the backend.
    """
    waiting = deque(together(cases))
    family = {case.id: case.family for case in cases}
    results: dict[str, Result] = {}
    processes: list[_Process] = []

    def note(result: Result) -> None:
        results[result.case] = result
        if progress is not None:
            progress(result, len(results), len(cases))

    try:
        while len(results) < len(cases):
            while waiting and len(processes) < jobs:
                processes.append(_started(asked, waiting.popleft(), jobs))
            ready = wait([one.connection for one in processes], None if all(p.opened for p in processes) else OPENING)
            if not ready:
                raise DeviceError(f"conformance: a process did not open {asked.backend} within {OPENING:g} s")
            for one in [p for p in processes if p.connection in ready]:
                answer = _answer(one)
                if isinstance(answer, Result):
                    one.left.popleft()
                    note(answer)
                elif answer is not None:
                    note(_lost(one.left.popleft(), family, answer))
                    processes.remove(one)
                    if one.left:
                        waiting.appendleft(list(one.left))
                    continue
                if not one.left and waiting:
                    one.left.extend(waiting.popleft())
                    one.connection.send(list(one.left))
                elif not one.left:
                    _end(one)
                    processes.remove(one)
    finally:
        for one in processes:
            one.process.terminate()
            one.process.join(10)
    return [results[case.id] for case in cases]


def _started(asked: Asked, names: Sequence[str], jobs: int) -> _Process:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    # Not a daemon: cases spawn processes of their own.
    process = context.Process(target=_serve, args=(asked, there))
    with _threads(max(1, (os.cpu_count() or 1) // jobs)):
        process.start()
    there.close()
    here.send(list(names))
    return _Process(process=process, connection=here, left=deque(names))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Processes started inside share the cores: torch's threads spin, and two for a core are many times slower."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(min(count, int(before))) if before and before.isdigit() else str(count)
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _answer(one: _Process) -> Result | int | None:
    """A result; None from a process that has opened the backend; the exit code of one that has ended.

    Raises:
        DeviceError: it ended before it had opened the backend.
    """
    try:
        received: Result | str = one.connection.recv()
    except (EOFError, ConnectionResetError):
        one.process.join(10)
        code = one.process.exitcode
        if not one.opened:
            raise DeviceError(f"conformance: a process ended with exit code {code} before it had opened") from None
        return -1 if code is None else int(code)
    if isinstance(received, Result):
        return received
    if received:
        raise DeviceError(f"conformance: a process could not open the backend: {received}")
    one.opened = True
    return None


def _lost(name: str, family: dict[str, str], code: int) -> Result:
    message = f"the process that asked ended with exit code {code}"
    return Result(case=name, family=family[name], outcome="failed", message=message, seconds=0.0)


def _end(one: _Process) -> None:
    one.connection.send(None)
    one.process.join(60)
    if one.process.is_alive():
        one.process.terminate()
    one.connection.close()


def _serve(asked: Asked, connection: Connection) -> None:
    """In a process of its own: open the backend, say so, and answer the cases that come."""
    from .kit import ask, open_for, select

    try:
        target = open_for(asked.backend, asked.families, asked.plugins, asked.providers)
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        return
    target.demands = frozenset(asked.demands)
    try:
        cases = {case.id: case for case in select(asked.tier, asked.families, target.dtype)}
        connection.send("")
        while (names := connection.recv()) is not None:
            for name in names:
                connection.send(ask(cases[name], target, asked.gaps))
    except (EOFError, BrokenPipeError):
        pass  # whoever asked has gone
    finally:
        target.close()
