"""Processes of one group that are asked the same thing at the same time, and what is said of one that does not answer.

They are spawned once and asked many times: importing torch takes longer than most questions.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from .case import Mismatch

START_TIMEOUT = 300.0
TIMEOUT = 60.0
"""Seconds until all processes must stand, and until all must have answered a question."""

GRACE = 2.0
"""Seconds that the others get after one process has raised: they may wait for it for ever."""

SLICE = 1.0
"""Seconds waited at a time, and counted for it at most: a machine that was stopped meanwhile is not held against us."""


class RankLost(BaseException):
    """A process died, hung or raised. Not an ``Exception``, so that no search for a simpler case runs into it again."""


class Ranks:
    """``size`` processes that have joined one group."""

    def __init__(self, size: int, join: str, *arguments: Any, timeout: float | None = None) -> None:
        """
        Args:
            join: ``"module:function"``, called in each process with ``rank, size, init_method, timeout, *arguments``;
                what it returns is the first argument of every question there.
            timeout: seconds for each question.

        Raises:
            RankLost: a process did not start or join.
        """
        self.size = size
        self._timeout = TIMEOUT if timeout is None else timeout
        self._folder = tempfile.TemporaryDirectory(prefix="deepinfer-ranks-")
        meeting = (Path(self._folder.name) / "store").as_uri()
        context = multiprocessing.get_context("spawn")
        self._processes, self._pipes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            # Twice the time: what hangs is told by this process, not by the collective's own error.
            answers = (there, rank, size, meeting, 2 * self._timeout, join, arguments)
            process = context.Process(target=_member, args=answers, daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        self._gather("joining the group", START_TIMEOUT)

    @property
    def alive(self) -> bool:
        """False after :meth:`close`, and after a process was lost."""
        return bool(self._processes)

    def ask(self, function: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Call ``"module:function"`` in every process, with the arguments of its rank; the answers by rank.

        Raises:
            RankLost: naming the rank, and what became of it. Unless every process raised, all are gone then.
        """
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((function, tuple(arguments[rank])))
            except OSError:
                self._ended(rank, "being asked")
        return self._gather(function.partition(":")[2], self._timeout)

    def close(self) -> None:
        """End all processes. Idempotent."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(GRACE)
            process.kill()
            process.join()
        self._processes, self._pipes = [], []
        self._folder.cleanup()

    def _gather(self, what: str, timeout: float) -> list[Any]:
        answers: dict[int, Any] = {}
        raised: dict[int, str] = {}
        left = timeout
        while len(answers) + len(raised) < self.size:
            waiting: dict[Any, int] = {p: r for r, p in enumerate(self._pipes) if r not in answers and r not in raised}
            started = time.monotonic()
            ready: list[Any] = wait(list(waiting), min(left, SLICE))
            left -= min(time.monotonic() - started, SLICE)
            if not ready and left <= 0:
                break
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    ok, value = pipe.recv()
                except (EOFError, OSError):
                    self._ended(rank, what)
                (answers if ok else raised)[rank] = value
                if not ok:
                    left = min(left, GRACE)
        if raised:
            text = f"rank {min(raised)} of {self.size}{raised[min(raised)]}"
            if len(raised) == self.size:
                raise RankLost(text)  # all of them, so nobody waits for anybody: they can be asked again
            self._lose(text)
        if len(answers) < self.size:
            self._hung(sorted(answers), what, timeout)
        return [answers[rank] for rank in range(self.size)]

    def _ended(self, rank: int, what: str) -> NoReturn:
        self._processes[rank].join(GRACE)
        code = self._processes[rank].exitcode
        self._lose(f"rank {rank} of {self.size} raised nothing and ended with exit code {code} while {what}")

    def _hung(self, back: Iterable[int], what: str, timeout: float) -> NoReturn:
        missing = [rank for rank in range(self.size) if rank not in back]
        self._lose(
            f"{_named(missing)} of {self.size} did not come back from {what} within {timeout:g} s, "
            f"{_named(back) or 'nobody'} did: expected every process to take part in every call, also without rows"
        )

    def _lose(self, text: str) -> NoReturn:
        for process in self._processes:
            process.kill()
        self.close()
        raise RankLost(text)


def _named(ranks: Iterable[int]) -> str:
    found = list(ranks)
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}" if found else ""


def _member(
    pipe: Connection, rank: int, size: int, meeting: str, timeout: float, join: str, arguments: tuple[Any, ...]
) -> None:
    """Join, then answer until the pipe is closed."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    try:
        import torch

        torch.set_num_threads(1)  # the processes share the cores
        state = _named_function(join)(rank, size, meeting, timeout, *arguments)
        pipe.send((True, None))
    except BaseException as error:
        pipe.send((False, _told(error)))
        return
    while True:
        try:
            function, given = pipe.recv()
        except EOFError:
            os._exit(0)  # there is nothing to save, and leaving a group in good order takes seconds
        try:
            pipe.send((True, _named_function(function)(state, *given)))
        except BaseException as error:
            pipe.send((False, _told(error)))


def _told(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f": {lines[0]}" if isinstance(error, Mismatch) else f" raised {type(error).__name__}: {lines[0]}"


def _named_function(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def join_host_group(rank: int, size: int, init_method: str, timeout: float) -> Any:
    """A :class:`ProcessGroup` whose collectives run over the host."""
    from datetime import timedelta

    import torch.distributed as dist

    from deepinfer_core.api import ProcessGroup

    dist.init_process_group(
        "gloo", init_method=init_method, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )
    handle = dist.group.WORLD
    assert handle is not None
    return ProcessGroup(rank=rank, size=size, handle=handle, device_type="cpu")
