"""Runs an engine in a thread of its own, fed by commands, so that many callers can share it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import structlog

from deepinfer_core.api import InvalidRequestError

from .commit import Committed
from .core import EngineCore
from .request import Request

T = TypeVar("T")
log = structlog.get_logger("deepinfer.engine")


class EngineDriver:
    """Owns the engine's thread. Everything that touches the engine goes through :meth:`call`.

    ``notify`` is called in that thread with each request that has something to fetch: new deltas, or its end.
    """

    def __init__(self, core: EngineCore, notify: Callable[[Request], None]) -> None:
        self._core = core
        self._notify = notify
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="deepinfer-engine", daemon=True)
        self._thread.start()

    def call(self, fn: Callable[[EngineCore], T]) -> Future[T]:
        """Run ``fn(core)`` between steps; what it raises is raised from the future, as is that the engine is closed."""
        future: Future[T] = Future()

        def command() -> None:
            try:
                future.set_result(fn(self._core))
            except Exception as error:
                future.set_exception(error)

        with self._lock:  # a command behind the one that ends the thread would never be run
            if not self._closed:
                self._commands.put(command)
                return future
        future.set_exception(InvalidRequestError("this AsyncLLM is closed: make a new one"))
        return future

    def add(self, request: Request, *, aborted: bool = False) -> Future[None]:
        """Queue a validated request; one that is ``aborted`` already ends before anything of it runs."""

        def enter(core: EngineCore) -> None:
            self._tell(core.add([request]))
            if aborted:
                self._tell(core.abort([request.request_id]))

        return self.call(enter)

    def abort(self, request_id: str) -> Future[None]:
        """End a request with ``abort``; unknown and finished ids are ignored."""
        return self.call(lambda core: self._tell(core.abort([request_id])))

    def close(self) -> None:
        """Abort everything and end the thread. Idempotent."""
        self.call(lambda core: self._tell(core.abort(list(core.requests))))
        with self._lock:
            if not self._closed:
                self._closed = True
                self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            busy = self._core.has_unfinished
            if not self._obey(wait=not busy):
                self._core.drain()
                return
            if self._core.has_unfinished:
                self._step()

    def _obey(self, *, wait: bool) -> bool:
        """Run waiting commands, or the next one if there is nothing else to do. False when it is time to end."""
        try:
            command = self._commands.get(block=wait)
            while command is not None:
                command()
                command = self._commands.get(block=False)
        except queue.Empty:
            return True
        return False

    def _step(self) -> None:
        try:
            self._tell(self._core.step())
        except Exception:
            log.exception("the engine loop raised; live requests are aborted")
            self._tell(self._core.abort(list(self._core.requests)))
            self._tell(self._core.drain())

    def _tell(self, committed: Committed) -> None:
        for request in committed.finished:
            self._notify(request)
        for request in committed.streamed:
            self._notify(request)
