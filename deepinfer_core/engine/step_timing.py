"""Where the time of a step goes: on the host, on the device, and waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import attrs

from deepinfer_core.api import Event, Stream

T = TypeVar("T")


@attrs.define
class Work:
    """The closure of a step, as it ran: when, and whether it was done by the time ``submit`` returned."""

    start: float = 0.0
    end: float = 0.0
    inline: bool = False


@attrs.define(kw_only=True)
class StepTiming:
    """One step. Times are seconds on the engine's monotonic clock.

    Attributes:
        tokens: rows; ``prefill`` of them belong to prompts (or are recomputed). requests: how many have rows.
        output_tokens: tokens that became known.
        plan_start, plan_end, launch_end: the host plans the step and gives it to the stream.
        wait_start, wait_end: the host waits for its result. commit_end: the result is applied.
        late: the result was not there yet when the host began to wait.
        seconds: from when it could start, the result of the step before it at the earliest, to its result.
    """

    number: int
    tokens: int
    prefill: int
    requests: int
    plan_start: float
    plan_end: float
    launch_end: float
    work: Work
    wait_start: float = 0.0
    wait_end: float = 0.0
    commit_end: float = 0.0
    late: bool = False
    seconds: float = 0.0
    output_tokens: int = 0

    @property
    def device_end(self) -> float:
        """When the device had finished. A device that works behind its queue is seen to finish when the host waits
        for it; if it was done before that, the end of the launch is all that is known."""
        return self.wait_end if self.late and not self.work.inline else self.work.end

    @property
    def device_seconds(self) -> float:
        return max(0.0, self.device_end - self.work.start)

    @property
    def host_seconds(self) -> float:
        """Planning, launching and committing, without device work done inline."""
        inline = self.work.end - self.work.start if self.work.inline else 0.0
        return self.launch_end - self.plan_start - inline + self.commit_end - self.wait_end


class TimedStream:
    """A stream that notes when its closures run; ``last`` is about the newest one."""

    def __init__(self, stream: Stream, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self.last = Work()

    def submit(self, fn: Callable[[], T]) -> Event[T]:
        clock, work = self._clock, Work()
        caller = threading.get_ident()

        def timed() -> T:
            work.inline = threading.get_ident() == caller
            work.start = clock()
            try:
                return fn()
            finally:
                work.end = clock()

        event = self._stream.submit(timed)
        work.inline = work.inline and event.done()
        self.last = work
        return event

    def close(self) -> None:
        self._stream.close()
