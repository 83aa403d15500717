"""What the request loop tells about itself: timelines, step timings, metrics, trace and log events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from deepinfer_core.api import Event, EventKind, Policy, SchedulingEvent, Stream

from .decision_log import waits
from .slot_table import SlotTable
from .step_shape import prompt_rows
from .step_timing import StepTiming, TimedStream, Work
from .timeline import note

if TYPE_CHECKING:
    from .metrics import MetricsRecorder
    from .request import Request, Sequence
    from .step_plan import StepPlan
    from .trace_recorder import TraceRecorder

log = structlog.get_logger("deepinfer.engine")


class Observer:
    """One per engine; everything is called from the engine's thread.

    With no sink, trace or watcher, a step costs a few array operations here; requests cost something when they
    arrive, at each chunk of their prompt, at their first token, when they are preempted and when they end.

    Attributes:
        metrics, trace: where things go besides the timelines; None for nowhere.
        policy_plugin: who is blamed for what the scheduling policy raises.
        watchers: called with each committed step. plan_watchers: with each plan that was launched.
    """

    def __init__(self, slots: SlotTable, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.slots = slots
        self.clock = clock
        self.metrics: MetricsRecorder | None = None
        self.trace: TraceRecorder | None = None
        self.policy_plugin = "engine"
        self.watchers: list[Callable[[StepTiming], None]] = []
        self.plan_watchers: list[Callable[[StepPlan], None]] = []
        self._stream: TimedStream | None = None
        self._open: deque[StepTiming] = deque()
        self._last_result = 0.0

    def timed(self, stream: Stream) -> Stream:
        """The engine's stream, with its closures timed."""
        self._stream = TimedStream(stream, self.clock)
        return self._stream

    # ---- requests

    def tell(self, policy: Policy, kind: EventKind, sequence: Sequence, tokens: int) -> None:
        """Something happened to a sequence; the policy hears of it too."""
        now = self.clock()
        self._note(kind, sequence, tokens, now)
        request = sequence.request
        event = SchedulingEvent(
            kind=kind, request_id=request.request_id, time=now, tokens=tokens, tenant=request.tenant
        )
        try:
            policy.on_event(event)
        except Exception:
            self.plugin_failed(self.policy_plugin)
            log.exception("scheduling policy raised in on_event", kind=kind, request_id=request.request_id)

    def waits(self, sequence: Sequence, reason: str) -> None:
        waits(sequence, reason, self.clock)

    def first_token(self, sequence: Sequence) -> None:
        metrics = sequence.request.metrics
        if metrics.first_token is None:
            metrics.first_token = self.clock()
            note(sequence, metrics.first_token, "first_token")
            if self.metrics is not None:
                self.metrics.first_token(sequence.request)

    def finished(self, request: Request) -> None:
        """All completions of a request ended."""
        metrics = request.metrics
        if self.metrics is not None:
            self.metrics.finished(request)
        log.debug(
            "request finished",
            request_id=request.request_id,
            reasons=[s.finish_reason for s in request.sequences],
            prompt_tokens=len(request.prompt_token_ids),
            output_tokens=metrics.output_tokens,
            cached_tokens=metrics.cached_tokens,
            preemptions=metrics.preemptions,
            accepted_drafts=metrics.accepted_drafts,
            queue_time=metrics.queue_time,
            ttft=metrics.ttft,
            tpot=metrics.tpot,
            e2e=metrics.e2e,
        )

    def plugin_failed(self, plugin: str) -> None:
        if self.metrics is not None:
            self.metrics.add("plugin_errors_total", 1.0, plugin)

    def _note(self, kind: EventKind, sequence: Sequence, tokens: int, now: float) -> None:
        if kind == "queued":
            self._arrived(sequence, now)
        elif kind == "admitted" or kind == "resumed":
            cached = int(self.slots.computed[sequence.slot])
            note(sequence, now, kind, tokens=tokens, cached=cached)
            if self.metrics is not None and sequence.request.reads_prefix_cache:
                self.metrics.add("prefix_cache_queried_tokens_total", tokens)
                self.metrics.add("prefix_cache_hit_tokens_total", cached)
        elif kind == "preempted":
            note(sequence, now, "preempted", tokens=tokens)
            log.info("request preempted", request_id=sequence.request.request_id, child=sequence.child, tokens=tokens)
        elif kind == "finished" or kind == "aborted":
            self._ended(sequence, tokens, now)

    def _arrived(self, sequence: Sequence, now: float) -> None:
        note(sequence, now, "queued", prompt=sequence.prompt_len)
        if sequence.child == 0:
            if self.metrics is not None:
                self.metrics.arrived(sequence.request)
            if self.trace is not None:
                self.trace.arrived(sequence.request)

    def _ended(self, sequence: Sequence, tokens: int, now: float) -> None:
        request, reason = sequence.request, sequence.finish_reason or "abort"
        request.metrics.output_tokens += tokens
        request.metrics.longest_output = max(request.metrics.longest_output, tokens)
        note(sequence, now, "finished", reason=reason, tokens=tokens)
        if self.metrics is not None:
            self.metrics.add("requests_finished_total", 1.0, reason)
            self.metrics.observe("output_length_tokens", tokens)
            if sequence.error is not None:
                self.metrics.add("request_errors_total", 1.0, sequence.error.code)
        if self.trace is not None:
            self.trace.finished(sequence, tokens, reason, now)
        if sequence.error is not None:
            error = sequence.error
            say = log.error if error.code in ("internal", "nan_logits") else log.info
            say("request failed", request_id=request.request_id, code=error.code, message=error.message)

    # ---- steps

    def launched(self, plan: StepPlan, plan_start: float, plan_end: float) -> None:
        """A planned step was given to the stream."""
        chunks = prompt_rows(plan, self.slots)
        timing = StepTiming(
            number=plan.number,
            tokens=plan.num_tokens,
            prefill=self._note_chunks(plan, chunks, plan_end) if chunks.any() else 0,
            requests=len(plan.slots),
            plan_start=plan_start,
            plan_end=plan_end,
            launch_end=self.clock(),
            work=Work() if self._stream is None else self._stream.last,
        )
        self._open.append(timing)
        for watch in self.plan_watchers:
            watch(plan)

    def _note_chunks(self, plan: StepPlan, chunks: np.ndarray[Any, Any], now: float) -> int:
        """Put prompt rows into the timelines; returns how many there are."""
        columns = (plan.slots[chunks].tolist(), plan.starts[chunks].tolist(), plan.counts[chunks].tolist())
        for slot, start, tokens in zip(*columns, strict=True):
            sequence = self.slots.sequence[slot]
            if sequence is not None:
                note(sequence, now, "chunk", start=start, tokens=tokens)
        return sum(columns[2])

    def wait_starts(self, plan: StepPlan, event: Event[object]) -> None:
        """The host needs the result of the oldest step."""
        while self._open and self._open[0].number < plan.number:
            self._open.popleft()  # was lost, and never committed
        timing = self._open[0]
        timing.late = not event.done()
        timing.wait_start = self.clock()

    def wait_ends(self) -> None:
        self._open[0].wait_end = self.clock()

    def step_failed(self) -> None:
        """The device work of the oldest step raised."""
        self._open.popleft()
        if self.metrics is not None:
            self.metrics.add("failed_steps_total")

    def committed(self, output_tokens: int) -> StepTiming:
        """The oldest step was applied."""
        timing = self._open.popleft()
        timing.commit_end = self.clock()
        timing.output_tokens = int(output_tokens)
        timing.seconds = timing.wait_end - max(timing.plan_start, self._last_result)
        self._last_result = timing.wait_end
        if self.metrics is not None:
            self.metrics.step(timing)
        if self.trace is not None:
            self.trace.step(timing)
        for watch in self.watchers:
            watch(timing)
        return timing

    def flush(self) -> None:
        """Pass on what was gathered; called after each turn of the loop."""
        if self.metrics is not None:
            self.metrics.flush()

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()
        if self.trace is not None:
            self.trace.close()
