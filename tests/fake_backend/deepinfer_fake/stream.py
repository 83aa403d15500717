"""Streams that run late: a closure waits until somebody wants its result, or until a delay has passed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

DELAY = 0.005
"""Seconds that work lies in the queue when nobody waits for it. It is never run before."""


class LateEvent(Generic[T]):
    """The end of one closure. Waiting for it makes its stream run up to it."""

    def __init__(self, stream: LateStream, number: int, outcome: Future[T]) -> None:
        self._stream = stream
        self._number = number
        self._outcome = outcome

    def done(self) -> bool:
        return self._outcome.done()

    def wait(self) -> T:
        self._stream.want(self._number)
        return self._outcome.result()


class LateStream:
    """Runs closures in order on a thread of its own, as late as it may."""

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._queue: deque[tuple[int, float, Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._count = 0
        self._wanted = 0
        self._closed = False
        self._worker = threading.Thread(target=self._run, name="fake-stream", daemon=True)
        self._worker.start()

    def submit(self, fn: Callable[[], T]) -> LateEvent[T]:
        outcome: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("fake device: the stream is closed")
            self._count += 1
            self._queue.append((self._count, time.monotonic() + self._delay, fn, outcome))
            self._changed.notify_all()
            return LateEvent(self, self._count, outcome)

    def want(self, number: int) -> None:
        """Somebody waits for the closure of this number, and so for all before it."""
        with self._changed:
            self._wanted = max(self._wanted, number)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._worker.join()

    def _run(self) -> None:
        torch.set_num_threads(1)
        while (work := self._next()) is not None:
            fn, outcome = work
            try:
                outcome.set_result(fn())
            except BaseException as error:  # the engine decides what a failed step means
                outcome.set_exception(error)
            del fn, outcome, work  # what a closure holds must not outlive it

    def _next(self) -> tuple[Callable[[], Any], Future[Any]] | None:
        with self._changed:
            while True:
                if not self._queue:
                    if self._closed:
                        return None
                    self._changed.wait()
                    continue
                number, due, fn, outcome = self._queue[0]
                left = due - time.monotonic()
                if number <= self._wanted or left <= 0 or self._closed:
                    self._queue.popleft()
                    return fn, outcome
                del fn, outcome
                self._changed.wait(left)
