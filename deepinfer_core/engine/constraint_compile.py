"""Compiles grammars in threads of its own, bounded in number, time and memory, and remembers the results."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable

import attrs
import structlog

from deepinfer_core.api import CompiledConstraint, ConstraintCompiler, ConstraintSpec

log = structlog.get_logger("deepinfer.constraints")

MAX_STUCK = 8
"""Threads that may be left behind with a grammar that takes too long; then no new one is compiled until one ends."""
CLOSE_SECONDS = 5.0


@attrs.define(eq=False)
class CompileJob:
    """A grammar being compiled. ``done`` is set last; then either ``compiled`` or ``error`` is."""

    spec: ConstraintSpec
    compiled: CompiledConstraint | None = None
    error: str | None = None
    running: bool = False
    abandoned: bool = False
    done: bool = False


class CompilePool:
    """Worker threads, the jobs they work on, and a cache of what they made, by content.

    A native compiler cannot be stopped from outside. One that takes too long is left behind: its thread is replaced,
    and ends when the compiler returns. How many may be left behind is bounded.

    Attributes:
        hits, misses: requests for grammars that were, and were not, in the cache or being compiled.
    """

    def __init__(
        self, compiler: Callable[[], ConstraintCompiler], *, threads: int, cache_bytes: int, grammar_bytes: int
    ) -> None:
        self.hits = 0
        self.misses = 0
        self._compiler = compiler
        self._threads_wanted = threads
        self._cache_bytes = cache_bytes
        self._grammar_bytes = grammar_bytes
        self._cache: OrderedDict[tuple[str, str], CompiledConstraint] = OrderedDict()
        self._cached_bytes = 0
        self._jobs: dict[tuple[str, str], CompileJob] = {}
        self._queue: queue.SimpleQueue[CompileJob | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._stuck = 0
        self._changed = threading.Condition()

    def submit(self, spec: ConstraintSpec) -> CompileJob:
        """A job for a grammar: done at once if it is in the cache, shared with whoever else waits for it."""
        with self._changed:
            compiled = self._cache.get(spec.grammar)
            job = self._jobs.get(spec.grammar)
            if compiled is not None:
                self._cache.move_to_end(spec.grammar)
                self.hits += 1
                return CompileJob(spec, compiled=compiled, done=True)
            if job is not None:
                self.hits += 1
                return job
            if self._stuck >= MAX_STUCK:
                text = f"{self._stuck} earlier grammars took too long and are still being compiled: try again later"
                return CompileJob(spec, error=text, done=True)
            self.misses += 1
            job = self._jobs[spec.grammar] = CompileJob(spec)
            if len(self._threads) < self._threads_wanted:
                self._start_thread()
        self._queue.put(job)
        return job

    def abandon(self, job: CompileJob) -> None:
        """Nobody waits for a job any longer than it already did; its thread, if it has one, is replaced."""
        with self._changed:
            if job.done or job.abandoned:
                return
            job.abandoned = True
            if job.running:
                self._stuck += 1
                self._start_thread()
            else:
                self._jobs.pop(job.spec.grammar, None)

    def wait(self, seconds: float) -> None:
        """Return when a job ends, or after this many seconds."""
        with self._changed:
            if any(not job.abandoned for job in self._jobs.values()):
                self._changed.wait(seconds)

    def close(self) -> None:
        """End the threads; what a compiler still works on is left to it."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(CLOSE_SECONDS / len(self._threads))

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=f"deepinfer-grammar-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            with self._changed:
                if job.abandoned:
                    continue
                job.running = True
            self._compile(job)
            if self._was_left_behind(job):
                return

    def _was_left_behind(self, job: CompileJob) -> bool:
        """A job ended; true when its thread was replaced meanwhile."""
        with self._changed:
            job.done = True
            self._jobs.pop(job.spec.grammar, None)
            self._changed.notify_all()
            self._stuck -= job.abandoned
            return job.abandoned

    def _compile(self, job: CompileJob) -> None:
        try:
            compiled = self._compiler().compile(job.spec)
            size = compiled.nbytes
        except BaseException as error:  # native code raises what it likes, and must not take the thread with it
            log.debug("grammar refused", kind=job.spec.kind, error=str(error))
            job.error = str(error) or type(error).__name__
            return
        if size > self._grammar_bytes:
            job.error = (
                f"the compiled grammar takes {size / 2**20:.0f} MiB: expected at most "
                f"structured_outputs.compiled_bytes={self._grammar_bytes}"
            )
            return
        job.compiled = compiled
        with self._changed:
            self._cache[job.spec.grammar] = compiled
            self._cached_bytes += size
            while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
                self._cached_bytes -= self._cache.popitem(last=False)[1].nbytes
