"""Hands records to something slow or unreliable, in a thread of its own, so that a step never waits for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import structlog

T = TypeVar("T")
log = structlog.get_logger("deepinfer.observability")

MAX_FAILURES = 3
QUEUE_SIZE = 4096
"""Records a pump holds while its receiver is busy; more are dropped and counted."""
CLOSE_SECONDS = 5.0


class Pump(Generic[T]):
    """Calls ``receive`` with each record, in order, and ``close`` after the last one.

    Attributes:
        failures: how often the receiver raised; after :data:`MAX_FAILURES` it is called no more.
        dropped: records that found the queue full.
    """

    def __init__(
        self, name: str, receive: Callable[[T], None], close: Callable[[], None], *, size: int = QUEUE_SIZE
    ) -> None:
        self.name = name
        self.failures = 0
        self.dropped = 0
        self._receive = receive
        self._close = close
        self._size = size
        self._queue: queue.SimpleQueue[T | threading.Event | None] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"deepinfer-{name}", daemon=True)
        self._thread.start()

    @property
    def disabled(self) -> bool:
        return self.failures >= MAX_FAILURES

    def put(self, record: T) -> None:
        """Give the receiver a record soon. Never blocks."""
        if self.disabled:
            return
        if self._queue.qsize() < self._size:
            self._queue.put(record)
            return
        if not self.dropped:
            log.warning("records dropped", receiver=self.name, waiting=self._size)
        self.dropped += 1

    def flush(self, timeout: float) -> bool:
        """Wait until what was put so far has been received; False when that takes longer than ``timeout`` seconds."""
        reached = threading.Event()
        self._queue.put(reached)
        return reached.wait(timeout)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Let the receiver finish, but wait no longer than ``timeout`` seconds for it. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._queue.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            log.warning("receiver did not finish", receiver=self.name, seconds=timeout)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            elif not self.disabled:
                self._give(item)
        try:
            self._close()
        except Exception as error:
            self._report("receiver raised in close", error)

    def _give(self, record: T) -> None:
        try:
            self._receive(record)
        except Exception as error:
            self.failures += 1
            if self.failures == 1:
                self._report("receiver raised", error)
            if self.disabled:
                log.error("receiver disabled", receiver=self.name, failures=self.failures)

    def _report(self, event: str, error: Exception) -> None:
        """A full disk is no bug of the receiver: its traceback would say nothing."""
        trouble = isinstance(error, OSError)
        log.error(event, receiver=self.name, error=str(error), exc_info=None if trouble else error)
